"""The wheel holds everything: unpacked into an empty folder, a model is trained from outside the checkout, a file is
imported and a program profiled."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
from pathlib import Path
import recperf
from recperf.cli import main
assert Path(recperf.__file__).is_relative_to(sys.argv[1]), recperf.__file__
assert main(["doctor"]) == 0
sys.path.append(TESTS)
import short
short.shorten()
few = ["--data.source", "embedded", "--train.max-steps", "20", "--train.device", "cpu", "--no-peaks", "--quiet"]
# 5: so short a training may miss its target.
assert main(["run", "micro-dlrm", *few]) in (0, 5)
rows = [f"{user},{(7 * user + 3 * at) % 50},{at % 5 + 1},{86400 * at}" for user in range(40) for at in range(60)]
Path("ratings.csv").write_text("\\n".join(["userId,movieId,rating,timestamp", *rows]))
assert main(["data", "import", "ratings.csv", "--name", "mine", "--quiet"]) == 0
Path("train.py").write_text(SCRIPT)
assert main(["profile", "--script", "train.py", "--no-peaks", "--no-try", "--quiet", "--run-dir", "profile"]) == 0
"""
SCRIPT = """
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(400):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_wheel_is_complete_and_works(tmp_path: Path) -> None:
    # A copy: building leaves a folder in the source tree.
    source, installed = tmp_path / "source", tmp_path / "installed"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    names = [name for name in tracked.stdout.decode().split("\0") if name and (ROOT / name).exists()]
    for name in names:
        if name.startswith("src/") or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    call([sys.executable, "-c", build], source)
    (wheel,) = tmp_path.glob("recperf-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        expected = {name.removeprefix("src/") for name in names if name.startswith("src/recperf/")}
        assert expected <= set(archive.namelist())
        archive.extractall(installed)
    (tmp_path / "elsewhere").mkdir()
    program = f"SCRIPT, TESTS = {SCRIPT!r}, {str(Path(__file__).parent)!r}\n{PROGRAM}"
    call([sys.executable, "-c", program, str(installed)], tmp_path / "elsewhere", PYTHONPATH=str(installed))
    assert len(list((tmp_path / "elsewhere" / "runs").glob("*/report.html"))) == 1
    assert (tmp_path / "elsewhere" / "profile" / "profile.html").exists()


def call(command: list[str], folder: Path, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
