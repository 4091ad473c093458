"""When something is due: after which steps of a training to score or to save."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from .loop import Position

Due = Callable[[Position], bool]
"""Whether it is due now that so much is done. Asked once after every step."""


def never(_: Position) -> bool:
    return False


def every(steps: int) -> Due:
    """After every so many steps; 0 means never."""
    return (lambda at: at.step % steps == 0) if steps else never


def either(*dues: Due) -> Due:
    """When any is due; each is asked, since one may keep time."""
    return lambda at: max([due(at) for due in dues])


class Minutes:
    """After every so many minutes of this process; 0 means never. Counts from when it was made or last was due."""

    def __init__(self, minutes: float, *, clock: Callable[[], float] = monotonic) -> None:
        self.seconds, self.clock = 60 * minutes, clock
        self._last = clock()

    def __call__(self, _: Position) -> bool:
        if not self.seconds or self.clock() - self._last < self.seconds:
            return False
        self._last = self.clock()
        return True
