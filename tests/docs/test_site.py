"""The documentation builds as a site: every link leads somewhere, and no page loads anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recperf.cli import COMMANDS

ROOT = Path(__file__).parents[2]


def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs recperf[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")
    }
    assert {f"cli/{command}.html" for command in COMMANDS} < pages.keys()
    for name, text in pages.items():
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\ssrc=\"([^\"]*)|<link\b[^>]*\shref=\"([^\"]*)", text)
        assert not [address for pair in loaded for address in pair if re.match(r"(https?:)?//", address)], name
    assert "--train.batch-size INT" in re.sub("<[^>]*>", "", pages["cli/fields-micro-dlrm.html"])
    assert 'id="recperf.execution.step_profile.profile"' in pages["python.html"]


def test_the_first_page_is_short() -> None:
    """What is to be read beside commands with their output and tables."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    words = " ".join(line for line in text.splitlines() if not line.startswith("|")).split()
    assert len(words) <= 450
    assert "docs/step.svg" in text
    assert (ROOT / "docs" / "step.svg").is_file()
