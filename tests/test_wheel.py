"""The wheel holds everything: installed into an empty folder, every workload runs from outside the checkout, a file is
imported and a program profiled."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNS = {
    "micro-dlrm": "--data.source embedded --train.epochs 1 --train.max-steps 20",
    "micro-dlrm-dram": "--model.rows 5000 --data.batches 4 --data.held-out-batches 1 --train.batch-size 64",
    "dlrm": "--data.batches 3 --data.held-out-batches 1 --train.batch-size 64",
    "dlrm-v4": "--data.events 20000 --train.max-steps 3 --target.beat none",
}
PROGRAM = """
import sys
from pathlib import Path
import recperf
from recperf.cli import main
from recperf.measure import measuring
assert Path(recperf.__file__).is_relative_to(sys.argv[1]), recperf.__file__
assert main(["doctor"]) == 0
# How fast this machine is does not matter here.
measuring.SECONDS = measuring.REPEAT_SECONDS = 0.0
measuring.ROUNDS = 2
for line in sys.argv[2:]:
    # 5: so short a training may miss its target.
    assert main(["run", *line.split(), "--train.device", "cpu", "--no-peaks", "--quiet"]) in (0, 5), line
rows = [f"{user},{(7 * user + 3 * at) % 50},{at % 5 + 1},{86400 * at}" for user in range(40) for at in range(60)]
Path("ratings.csv").write_text("\\n".join(["userId,movieId,rating,timestamp", *rows]))
assert main(["data", "import", "ratings.csv", "--name", "mine", "--quiet"]) == 0
Path("train.py").write_text(SCRIPT)
assert main(["profile", "--script", "train.py", "--no-peaks", "--quiet", "--page", "profile.html"]) == 0
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
def test_every_workload_runs_from_an_installed_wheel(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    # A copy: building leaves a folder in the source tree.
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, tracked.stdout.decode().split("\0")):
        if name.startswith("src/") or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    call([*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(source)], tmp_path)
    (wheel,) = tmp_path.glob("recperf-*.whl")
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "recperf").rglob("*.[!p]*")}
    expected = {name for name in sources if "__pycache__" not in name}
    assert expected <= set(zipfile.ZipFile(wheel).namelist())
    installed = tmp_path / "installed"
    call([*pip, "install", "--no-deps", "--no-index", "--target", str(installed), str(wheel)], tmp_path)
    (tmp_path / "elsewhere").mkdir()
    lines = [f"{name} {options}" for name, options in RUNS.items()]
    call(
        [sys.executable, "-c", f"SCRIPT = {SCRIPT!r}\n{PROGRAM}", str(installed), *lines],
        tmp_path / "elsewhere",
        PYTHONPATH=str(installed),
    )
    assert len(list((tmp_path / "elsewhere" / "runs").glob("*/report.html"))) == len(RUNS)
    assert (tmp_path / "elsewhere" / "profile.html").exists()


def call(command: list[str], folder: Path, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
