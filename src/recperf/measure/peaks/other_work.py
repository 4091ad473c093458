"""How much of this process's cores other processes took while something was measured: every figure is worse by that."""

from __future__ import annotations

import os
from multiprocessing import active_children
from pathlib import Path
from time import monotonic

from ...machine import usable_cores

BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat that count as busy: user, nice, system, irq, softirq, and steal by a hypervisor."""
QUIET = 0.05
"""Up to this share of the cores other work counts as none; beside more, ceilings are measured a second time."""
DISTURBED = 0.15
"""A reading beside more other work than this share of the cores is repeated, and no claim is judged by it."""
_CGROUP = Path("/sys/fs/cgroup")


def not_judged(share: float, what: str) -> str:
    """Why a reading is not evidence."""
    return f"not judged: other work took {share:.0%} of the cores while {what}"


class OtherWork:
    """Measures the share of this process's cores that others took, from its creation to `share()`.

    The cores are those of its affinity, or fewer where a container has a quota. What a hypervisor stole and what a
    container's quota held back count as taken.
    """

    def __init__(self) -> None:
        self._began, self._busy, self._own = monotonic(), _busy_seconds(), _own_seconds()
        self._workers, self._group, self._throttled = _worker_seconds(), _group_seconds(), _throttled_seconds()

    def own_seconds(self) -> float:
        """CPU time of this process and of its worker processes, since then."""
        return _own_seconds() - self._own

    def share(self, own_seconds: float | None = None) -> float | None:
        """0: no other work; 1: every core worked for others; None: the system does not report it.

        `own_seconds` is the CPU time of all processes that belong to the measurement; by default of this one and
        of its worker processes.
        """
        busy, seconds = _busy_seconds(), monotonic() - self._began
        own = self.own_seconds() if own_seconds is None else own_seconds
        if busy is None or self._busy is None or seconds <= 0 or 2 * (busy - self._busy) < own - 0.1:
            return None
        cores = usable_cores()
        # Cores beyond a quota are free for others: their work takes nothing before those are used up.
        spare = (len(_allowed()) - cores) * seconds
        taken = max(0.0, busy - self._busy - own - spare)
        if spare:
            taken = max(taken, _group_seconds() - self._group - own)
        return min(1.0, (taken + _throttled_seconds() - self._throttled) / (seconds * cores))

    def workers(self) -> float:
        """Share of the cores that the worker processes of this one used."""
        return (_worker_seconds() - self._workers) / (max(1e-9, monotonic() - self._began) * usable_cores())


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _busy_seconds() -> float | None:
    """Time for which the cores of this process were busy, whoever used them."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        cores = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("cpu")}
        ticks = sum(int(cores[f"cpu{core}"][column]) for core in _allowed() for column in BUSY)
    except (OSError, ValueError, IndexError, KeyError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def _group_seconds() -> float:
    """CPU time of everything in this container; 0 where it is not reported."""
    return _cgroup_figure("cpu.stat", "usage_usec", 1e6) or _cgroup_figure("cpuacct/cpuacct.usage", None, 1e9)


def _throttled_seconds() -> float:
    """Time for which a quota held this container back."""
    return _cgroup_figure("cpu.stat", "throttled_usec", 1e6) or _cgroup_figure("cpu/cpu.stat", "throttled_time", 1e9)


def _cgroup_figure(file: str, name: str | None, per_second: float) -> float:
    try:
        lines = (_CGROUP / file).read_text().splitlines()
        text = lines[0] if name is None else dict(line.split() for line in lines).get(name, "0")
        return int(text) / per_second
    except (OSError, ValueError, IndexError):
        return 0.0


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
