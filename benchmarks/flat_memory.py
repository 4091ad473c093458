"""Memory of a long training: how much of it grows with steps, epochs and evaluations, as a slope with its interval.

python benchmarks/flat_memory.py                  two trainings of 200,000 tiny steps, by the command that a user runs
python benchmarks/flat_memory.py --steps 20000 --no-record

Anonymous memory of the process is read every second. After the first fifth of the steps the medians of equal parts of
them are fitted by a line, whose slope has an interval of 95 %.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
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
    "hstu, 400 short epochs": ["hstu", "--data.users", "2000", "--train.batch-size", "4", "--train.patience", "0"],
}


def training(words: list[str], steps: int, seconds: float) -> list[tuple[int, int]]:
    """Steps and bytes of anonymous memory at the readings of a training."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        # Enough epochs for all steps; no page and no profile at the end.
        ends = ["--train.epochs", str(steps), "--train.max-steps", str(steps), "--no-report", "--run-dir", str(run)]
        log = open(Path(folder) / "log", "w")
        process = subprocess.Popen(
            [sys.executable, "-m", "recperf", "run", *words, *ends], stdout=log, stderr=log, cwd=folder
        )
        readings: list[tuple[int, int]] = []
        while process.poll() is None:
            time.sleep(seconds)
            step = last_step(run / "events.jsonl")
            status = Path(f"/proc/{process.pid}/status")
            held = re.search(r"RssAnon:\s+(\d+) kB", status.read_text()) if status.exists() else None
            if held and 0 < step < steps and (not readings or step > readings[-1][0]):
                readings.append((step, int(held[1]) << 10))
        # A missed quality target is no failure here.
        if process.returncode not in (0, 5):
            sys.exit((Path(folder) / "log").read_text())
    return readings


def last_step(events: Path) -> int:
    """The last step that a log tells."""
    if not events.exists():
        return 0
    with events.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        found = re.findall(rb'"kind": "step".*?"step": (\d+)', file.read())
    return int(found[-1]) if found else 0


def slope(readings: list[tuple[int, int]], steps: int) -> tuple[float, float]:
    """Bytes a step, and half of its interval."""
    at_N, bytes_N = np.array(readings, float).T
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
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    missed = 0
    for name, words in TRAININGS.items():
        readings = training([*words, "--train.device", options.device], options.steps, options.seconds)
        growth, half = slope(readings, options.steps)
        held = [size / 2**20 for _, size in readings]
        at = {
            "steps": options.steps,
            "device": options.device,
            "goal": GOAL,
            "interval": [growth - half, growth + half],
        }
        at |= {"mib_first": held[0], "mib_last": held[-1], "mib_most": max(held), "readings": len(held)}
        rows.append(row("flat_memory", name, "memory_growth", "B/step", [growth], at))
        missed += growth - half > GOAL
        print(
            f"{name:<32} {growth:8.2f} bytes a step ({growth - half:.2f} to {growth + half:.2f}), "
            f"{held[0]:.0f} MiB at first, {held[-1]:.0f} at last, {max(held):.0f} at most",
            flush=True,
        )
    if not options.no_record:
        print(f"rows appended to {record(rows).name}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
