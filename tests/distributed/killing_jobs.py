"""Kill a rank at a chosen moment; each function installs a hook on one rank and returns."""

from __future__ import annotations

import os
import signal
from typing import Any

from recperf import points


def at_point(rank: int, on: int, point: str, nth: int) -> None:
    """Kill the rank when it reaches a named point for the nth time."""
    seen = [0]

    def listen(name: str) -> None:
        seen[0] += name == point
        if name == point and seen[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == on:
        points.listener = listen


def in_call(rank: int, on: int, function: str, nth: int) -> None:
    """Kill the rank at the nth call of a function of `os`, before the call takes effect."""
    original: Any = getattr(os, function)
    seen = [0]

    def dying(*arguments: Any, **named: Any) -> Any:
        seen[0] += 1
        if seen[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    if rank == on:
        setattr(os, function, dying)
