"""How much of the processor other processes used while something was measured: every ceiling is lower by that."""

from __future__ import annotations

import os
from multiprocessing import active_children
from pathlib import Path
from time import monotonic

BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat that count as busy: user, nice, system, irq, softirq, and steal by a hypervisor."""


class OtherWork:
    """Measures the share of all cores that other processes use, from its creation to `share()`."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = monotonic(), _busy_seconds(), _own_seconds()
        self._workers = _worker_seconds()

    def own_seconds(self) -> float:
        """CPU time of this process and of its worker processes, since then."""
        return _own_seconds() - self._own

    def share(self, own_seconds: float | None = None) -> float | None:
        """0: no other work; 1: every core worked for others; None: the system does not report it.

        `own_seconds` is the CPU time of all processes that belong to the measurement; by default of this one and
        of its worker processes.
        """
        busy, seconds = _busy_seconds(), monotonic() - self._began
        if busy is None or self._busy is None or seconds <= 0:
            return None
        others = (busy - self._busy) - (self.own_seconds() if own_seconds is None else own_seconds)
        return min(1.0, max(0.0, others / (seconds * (os.cpu_count() or 1))))

    def workers(self) -> float:
        """Share of all cores that the worker processes of this one used."""
        return (_worker_seconds() - self._workers) / (max(1e-9, monotonic() - self._began) * (os.cpu_count() or 1))


def _busy_seconds() -> float | None:
    try:
        columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(int(columns[index]) for index in BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + _worker_seconds()


def _worker_seconds() -> float:
    """CPU time of the processes that multiprocessing started for this one, such as the workers of a loader."""
    times = os.times()
    ended = times.children_user + times.children_system
    return ended + sum(_seconds_of(worker.pid) for worker in active_children() if worker.pid)


def _seconds_of(pid: int) -> float:
    """CPU time of a process and of its children that ended."""
    try:
        figures = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, figures)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
