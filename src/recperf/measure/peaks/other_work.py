"""How much of the processor other processes used while something was measured: every ceiling is lower by that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat that count as busy: user, nice, system, irq, softirq, and steal by a hypervisor."""


class OtherWork:
    """Measures the share of all cores that other processes use, from its creation to `share()`."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = monotonic(), _busy_seconds(), _own_seconds()

    def own_seconds(self) -> float:
        """CPU time of this process and of those that it started, since then."""
        return _own_seconds() - self._own

    def share(self, own_seconds: float | None = None) -> float | None:
        """0: no other work; 1: every core worked for others; None: the system does not report it.

        `own_seconds` is the CPU time of all processes that belong to the measurement; by default of this one and of
        those that it started.
        """
        busy, seconds = _busy_seconds(), monotonic() - self._began
        if busy is None or self._busy is None or seconds <= 0:
            return None
        others = (busy - self._busy) - (self.own_seconds() if own_seconds is None else own_seconds)
        return min(1.0, max(0.0, others / (seconds * (os.cpu_count() or 1))))


def _busy_seconds() -> float | None:
    try:
        columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(int(columns[index]) for index in BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _own_seconds() -> float:
    """CPU time of this process and of all that it started, such as the workers of a loader."""
    times = os.times()
    ended = times.children_user + times.children_system
    return times.user + times.system + ended + sum(_seconds_of(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return
    for child in map(int, " ".join(lists).split()):
        yield child
        yield from _descendants(child)


def _seconds_of(pid: int) -> float:
    """CPU time of a process and of its children that ended."""
    try:
        figures = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, figures)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
