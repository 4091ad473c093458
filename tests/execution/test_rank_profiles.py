"""Profiles of programs that train on several ranks: started by --ranks, or by the program itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import recperf
import short
import warm
from recperf.execution.rank_profiles import Meeting

PROGRAM = """
import os, sys, time
import torch
import torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel

def late():
    time.sleep(0.05)  # LATE

def train(rank=None):
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(80):
        if distributed.get_rank() == 1:
            late()
        model(torch.rand(32, 64)).mean().backward()
        optimizer.step()
    distributed.destroy_process_group()

if __name__ == "__main__":
    START
"""
ITSELF = """
    if "LOCAL_RANK" not in os.environ:
        import subprocess
        own = {**os.environ, "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        subprocess.Popen([sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]], env=own)
    train(int(os.environ.get("LOCAL_RANK", "0")))
"""
STARTS = {
    "--ranks": ("train()", ["--ranks", "2"]),
    "spawn": ("torch.multiprocessing.spawn(train, nprocs=2)", []),
    "itself": (ITSELF.strip(), []),
}
LONG = [pytest.param(way, marks=pytest.mark.long) for way in ("spawn", "itself")]


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("way", ["--ranks", *LONG])
def test_the_late_rank_and_its_line(way: str, tmp_path: Path) -> None:
    start, options = STARTS[way]
    source = PROGRAM.replace("START", start)
    (tmp_path / "train.py").write_text(source)
    command = warm.python(short.PROGRAM, "profile", *options, "--script", "train.py", "--no-peaks", "--no-try")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command += ["--no-report", "--run-dir", "profile", "--", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    profile = recperf.load(tmp_path / "profile" / "profile.json")
    assert (profile.ranks.ranks, profile.ranks.slowest) == (2, 1)
    line = next(at for at, text in enumerate(source.splitlines(), 1) if text.endswith("# LATE"))
    assert profile.ranks.why.startswith(f"train.py:{line} in late takes ")
    first, second = sorted(profile.ranks.each, key=lambda row: row.rank)
    assert second.own_ms - first.own_ms > 10
    assert first.late_ms > max(first.moving_ms, second.late_ms)
    assert f"train.py:{line} in late" in done.stdout


def test_only_a_further_rank_of_the_program_becomes_a_profile(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(1)")
    profile = [sys.executable, "-c", "import sys; raise SystemExit(7 if sys.argv[1:] == ['2'] else 8)"]

    def code(local_rank: str, *command: str) -> int:
        return subprocess.run([*command, "2"], env={**os.environ, "LOCAL_RANK": local_rank}, check=False).returncode

    with Meeting(script, profile).watched():
        assert code("1", sys.executable, str(script)) == 7
        assert code("0", sys.executable, str(script)) == 1
        assert code("1", sys.executable, "-c", "raise SystemExit(3)") == 3
