"""Profiles of programs that train on several ranks: started by --ranks, or by the program itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import recperf

PROGRAM = """
import os, sys, time
import torch
import torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel

def late():
    time.sleep(0.02)  # LATE

def train(rank=None):
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(150):
        if distributed.get_rank() == 1:
            late()
        model(torch.rand(32, 64)).mean().backward()
        optimizer.step()
    distributed.destroy_process_group()

if __name__ == "__main__":
    START
"""
STARTS = {
    "--ranks": ("train()", ["--ranks", "2"]),
    "spawn": ("torch.multiprocessing.spawn(train, nprocs=2)", []),
}


@pytest.mark.parametrize("way", ["--ranks", pytest.param("spawn", marks=pytest.mark.long)])
def test_the_late_rank_and_its_line(way: str, tmp_path: Path) -> None:
    start, options = STARTS[way]
    source = PROGRAM.replace("START", start)
    (tmp_path / "train.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "recperf",
        "profile",
        *options,
        "--script",
        "train.py",
        "--no-peaks",
        "--no-try",
    ]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command += ["--no-report", "--run-dir", "profile", "--", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    profile = recperf.load(tmp_path / "profile" / "profile.json")
    assert (profile.ranks.ranks, profile.ranks.slowest) == (2, 1)
    line = next(at for at, text in enumerate(source.splitlines(), 1) if text.endswith("# LATE"))
    assert profile.ranks.why.startswith(f"train.py:{line} in late takes ")
    first, second = sorted(profile.ranks.each, key=lambda row: row.rank)
    assert second.own_ms - first.own_ms > 10
    assert first.late_ms > max(first.moving_ms, second.late_ms)
    assert f"train.py:{line} in late" in done.stdout
