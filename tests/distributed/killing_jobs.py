"""What ends a rank in tests of resuming; each function arms one thing on one rank and returns."""

from __future__ import annotations

import os
import signal
from typing import Any

from recperf import points


def at_point(rank: int, on: int, point: str, nth: int) -> None:
    """At a named moment."""
    seen = [0]

    def listen(name: str) -> None:
        seen[0] += name == point
        if name == point and seen[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == on:
        points.listener = listen


def in_call(rank: int, on: int, function: str, nth: int) -> None:
    """At a call of a function of `os`, before it takes effect."""
    original: Any = getattr(os, function)
    seen = [0]

    def dying(*arguments: Any, **named: Any) -> Any:
        seen[0] += 1
        if seen[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    if rank == on:
        setattr(os, function, dying)
