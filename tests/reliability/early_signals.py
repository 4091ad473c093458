"""Real `recperf` processes that receive a signal at a chosen moment after they can receive one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from recperf.runs.contract import check_run
from recperf.stop import SIGNALS

CODES = {number: 130 if number == signal.SIGINT else 75 for number in SIGNALS}
"""The documented exit code of each signal."""
ENDLESS = [
    "run", "micro-dlrm", "--data.source", "embedded", "--train.epochs", "100000", "--train.threads", "1",
    "--target.beat", "none", "--no-peaks",
]  # fmt: skip
"""A run that trains until it is stopped."""


@dataclass(frozen=True)
class End:
    """How a process that received a signal ended."""

    number: int
    after_s: float
    """From the moment at which it could receive the signal."""
    took_s: float
    code: int
    output: str

    @property
    def fault(self) -> str | None:
        """What is wrong with this end; None: it is the documented one."""
        if self.code != CODES[signal.Signals(self.number)]:
            return f"exit code {self.code}"
        if "Traceback" in self.output:
            return "a traceback"
        return None if self.output.count("error: ") == 1 else "not one error line"


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command with the default action for every signal, also under nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        with log.open("ab") as file:
            return subprocess.Popen([sys.executable, "-m", "recperf", *arguments], stdout=file, stderr=file)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listens(pid: int) -> bool:
    """Whether a process has handlers for all of the signals."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return all(caught >> (number - 1) & 1 for number in SIGNALS)


def stop_after(process: subprocess.Popen[bytes], number: int, after_s: float, log: Path) -> End:
    """Send a signal some seconds after the process can receive it, and wait for its end."""
    limit = time.monotonic() + 60
    while not listens(process.pid):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < limit
        time.sleep(0.001)
    time.sleep(after_s)
    began = time.monotonic()
    if process.poll() is None:
        os.kill(process.pid, number)
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return End(number, after_s, time.monotonic() - began, code, log.read_text())


def series(seed: int, count: int, folder: Path, *, most_s: float = 4.0, at_once: int = 2) -> list[End]:
    """Start a run `count` times, each stopped by a signal in its first seconds."""
    draw, ends = random.Random(seed), list[End]()
    for first in range(0, count, at_once):
        jobs = []
        for index in range(first, min(first + at_once, count)):
            log = folder / f"run-{index}.log"
            process = start([*ENDLESS, "--run-dir", str(log.with_suffix(""))], log)
            jobs.append((process, SIGNALS[index % len(SIGNALS)], draw.uniform(0.0, most_s), log))
        with ThreadPoolExecutor(at_once) as threads:
            ends += threads.map(stop_after, *zip(*jobs, strict=True))
    return ends


def finishes(run: Path, log: Path) -> bool:
    """Whether a stopped run ends well after a resume with few steps, and what is claimed of every run holds.

    Where a signal came before the folder was made, the same command starts it.
    """
    last = max((int(path.name[5:]) for path in run.glob("checkpoints/seed-*/step-*")), default=0)
    again = [*ENDLESS, "--run-dir", str(run)]
    if (run / "config.json").exists():
        again = ["run", "--resume", str(run), "--allow-change", "train.max_steps"]
    code = start([*again, "--train.max-steps", str(last + 20), "--no-report", "--no-peaks"], log).wait(120)
    return code == 0 and all(finding.holds for _, finding in check_run(run, ()))


def table(ends: list[End]) -> str:
    """Tries, faults and the longest time to the end, by signal."""
    rows = [f"{'signal':<8} {'tries':>5} {'faults':>6} {'longest end':>12}"]
    for number in SIGNALS:
        own = [end for end in ends if end.number == number]
        if own:
            faults = sum(end.fault is not None for end in own)
            rows.append(f"{number.name:<8} {len(own):>5} {faults:>6} {max(end.took_s for end in own):>10.1f} s")
    return "\n".join(rows)
