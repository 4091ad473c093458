"""A profiled program that is stopped leaves no process behind, and its end waits for none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing, signal, subprocess, sys, time
import torch
from torch import nn

def wait(queue, path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(path, "w").write(f"{multiprocessing.current_process().pid} {other.pid} ")
    time.sleep(600)

if __name__ == "__main__":
    queue = multiprocessing.Queue()
    multiprocessing.Process(target=wait, args=(queue, sys.argv[1])).start()
    queue.put(b"x" * (1 << 22))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        model(torch.rand(8, 4)).mean().backward()
        time.sleep(0.01)
        if sys.argv[2] == "steps":
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 75, marks=pytest.mark.long),
        pytest.param(None, 0, marks=pytest.mark.long),
    ],
)
def test_a_stopped_program_ends_soon_with_all_of_its_processes(number: int | None, code: int, tmp_path: Path) -> None:
    script, pids = tmp_path / "train.py", tmp_path / "pids"
    script.write_text(PROGRAM)
    options = ["--script", str(script), "--no-peaks", "--no-try", "--no-report", "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "recperf", "profile", *options, "--", str(pids)]
    with subprocess.Popen([*command, "steps" if number is None else "none"], stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 300
            while not (pids.exists() and pids.read_text().endswith(" ")) and time.monotonic() < until:
                time.sleep(0.02)
            began = time.monotonic()
            if number is not None:
                time.sleep(0.2)
                process.send_signal(number)
            assert process.wait(300) == code
            assert number is None or time.monotonic() - began < 100
        finally:
            process.kill()
    running = [int(pid) for pid in pids.read_text().split()]
    assert len(running) == 2
    for pid in running:
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < until:
                os.kill(pid, 0)
                time.sleep(0.02)
