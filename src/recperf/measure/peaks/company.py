"""What other work took of the processor while something was measured: it is missing in every ceiling."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat that are work: user, nice, system, interrupts twice, and what a hypervisor gave to others."""


class Company:
    """Between its making and `share()`, the part of all cores that other processes used."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = monotonic(), _busy_seconds(), _own_seconds()

    def own_seconds(self) -> float:
        """Processor time of this process since then."""
        return _own_seconds() - self._own

    def share(self, own_seconds: float | None = None) -> float | None:
        """0 when we were alone, 1 when every core worked for others; None where the system does not tell.

        `own_seconds` are those of all processes that are not others; by default of this one.
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
    used = os.times()
    return used.user + used.system
