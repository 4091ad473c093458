"""What a thread did between two moments: wall time, time on a core, and time in which it waited for a core."""

from __future__ import annotations

import os
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple


class Moment(NamedTuple):
    wall: int
    cpu: int
    waiting: int
    """Time since the thread began in which it could have run but other work had its core."""

    def since(self, before: Moment) -> Moment:
        return Moment(self.wall - before.wall, self.cpu - before.cpu, self.waiting - before.waiting)

    def plus(self, other: Moment) -> Moment:
        return Moment(self.wall + other.wall, self.cpu + other.cpu, self.waiting + other.waiting)

    @property
    def off(self) -> int:
        """Time in which the thread waited for something other than a core: a sleep, a lock, a disk."""
        return max(0, self.wall - self.cpu - self.waiting)


class ThreadClock:
    """Reads the clocks of the thread that created it, in a few microseconds."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def now(self) -> Moment:
        waiting = 0
        if self._file is not None:
            try:
                waiting = int(os.pread(self._file, 96, 0).split()[1])
            except (OSError, IndexError, ValueError):
                waiting = 0
        return Moment(perf_counter_ns(), thread_time_ns(), waiting)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
