"""Memory of a long training: how much of it grows with steps, epochs and evaluations, as a slope with its interval.

python benchmarks/flat_memory.py                  trainings of 200,000 tiny steps, by the command that a user runs
python benchmarks/flat_memory.py --steps 20000 --no-record
python benchmarks/flat_memory.py --device cuda --minutes 8                  all of them in 8 minutes, on a GPU

Anonymous memory of the process is read every second, and on a GPU the memory that its driver says is used. After the
first fifth of the steps the medians of equal parts of them are fitted by a line, whose slope has an interval of 95 %.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from _rows import record, row

STEPS = 200_000
PARTS = 20
SKIPPED = 0.2
"""Share of the steps in which allocators and caches fill."""
T_95 = 2.101
"""Of Student's distribution with 18 degrees of freedom, as the line through 20 parts has."""
GOAL = 4.0
"""Bytes a step by which memory may grow where the interval leaves no doubt: 1 MB in a quarter of a million steps."""

TRAININGS = {
    "micro-dlrm, 10 long epochs": ["micro-dlrm", "--data.source", "embedded", "--train.batch-size", "4"],
    "next-item, counted": ["next-item", "--data.users", "500", "--train.batch-size", "4", "--train.patience", "0"],
    "hstu, 400 short epochs": ["hstu", "--data.users", "2000", "--train.batch-size", "4", "--train.patience", "0"],
}


Reading = tuple[int, int, int]
"""Steps, bytes of anonymous memory, and bytes that are used on the device."""


def training(
    words: list[str], steps: int, seconds: float, *, limit_s: float = 0.0, cuda: bool = False
) -> list[Reading]:
    """The readings of a training, which is stopped after `limit_s` seconds, if that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        # Enough epochs for all steps; no page and no profile at the end.
        ends = ["--train.epochs", str(steps), "--train.max-steps", str(steps), "--no-report", "--run-dir", str(run)]
        log = open(Path(folder) / "log", "w")
        process = subprocess.Popen(
            [sys.executable, "-m", "recperf", "run", *words, *ends], stdout=log, stderr=log, cwd=folder
        )
        readings: list[Reading] = []
        began, stopped = time.monotonic(), False
        while process.poll() is None:
            time.sleep(seconds)
            if limit_s and time.monotonic() - began > limit_s and not stopped:
                process.send_signal(signal.SIGTERM)
                stopped = True
            step = last_step(run / "events.jsonl")
            status = Path(f"/proc/{process.pid}/status")
            held = re.search(r"RssAnon:\s+(\d+) kB", status.read_text()) if status.exists() else None
            if held and not stopped and 0 < step < steps and (not readings or step > readings[-1][0]):
                readings.append((step, int(held[1]) << 10, device_bytes() if cuda else 0))
        # A missed quality target is no failure here.
        if process.returncode not in (0, 5, *[75] * stopped):
            sys.exit((Path(folder) / "log").read_text())
    return readings


def device_bytes() -> int:
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def last_step(events: Path) -> int:
    """The last step that a log tells."""
    if not events.exists():
        return 0
    with events.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        found = re.findall(rb'"kind": "step".*?"step": (\d+)', file.read())
    return int(found[-1]) if found else 0


def slope(readings: Sequence[tuple[int, ...]], steps: int, column: int = 1) -> tuple[float, float]:
    """Bytes a step, and half of its interval, by a column of the readings."""
    at_N, bytes_N = np.array(readings, float).T[[0, column]]
    edges = np.linspace(SKIPPED * steps, steps, PARTS + 1)
    parts = [(at_N >= begin) & (at_N < end) for begin, end in zip(edges, edges[1:])]
    at_P = np.array([at_N[part].mean() for part in parts])
    bytes_P = np.array([np.median(bytes_N[part]) for part in parts])
    (growth, start), spread = np.polyfit(at_P, bytes_P, 1), at_P - at_P.mean()
    off_P = bytes_P - start - growth * at_P
    return float(growth), float(T_95 * np.sqrt((off_P**2).sum() / (PARTS - 2) / (spread**2).sum()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=1.0, help="between readings")
    parser.add_argument("--minutes", type=float, default=0.0, help="of all trainings together; 0: no limit")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    missed = 0
    cuda, limit_s = options.device == "cuda", 60 * options.minutes / len(TRAININGS)
    for name, words in TRAININGS.items():
        words = [*words, "--train.device", options.device]
        readings = training(words, options.steps, options.seconds, limit_s=limit_s, cuda=cuda)
        steps = readings[-1][0] + 1 if limit_s else options.steps
        for column, memory in [(1, "host"), *[(2, "device")] * cuda]:
            growth, half = slope(readings, steps, column)
            held = [reading[column] / 2**20 for reading in readings]
            at = {
                "steps": steps,
                "device": options.device,
                "memory": memory,
                "goal": GOAL,
                "interval": [growth - half, growth + half],
            }
            at |= {"mib_first": held[0], "mib_last": held[-1], "mib_most": max(held), "readings": len(held)}
            rows.append(row("flat_memory", f"{name}, {memory}", "memory_growth", "B/step", [growth], at))
            missed += growth - half > GOAL
            print(
                f"{name:<32} {memory:<7} {growth:8.2f} bytes a step ({growth - half:.2f} to {growth + half:.2f}), "
                f"{held[0]:.0f} MiB at first, {held[-1]:.0f} at last, {max(held):.0f} at most",
                flush=True,
            )
    if not options.no_record:
        print(f"rows appended to {record(rows).name}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
