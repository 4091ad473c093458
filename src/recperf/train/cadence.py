"""After which steps of a training to evaluate or to save."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from .loop import Position

Due = Callable[[Position], bool]
"""Whether something is due at a position; called once after every step."""


def never(_: Position) -> bool:
    return False


def every(steps: int) -> Due:
    """Due every `steps` steps; 0 means never."""
    return (lambda at: at.step % steps == 0) if steps else never


def either(*dues: Due) -> Due:
    """Due when any is; each is called, since one may measure time."""
    return lambda at: max([due(at) for due in dues])


class Minutes:
    """Due every `minutes` minutes of this process; 0 means never. Counts from its creation or the last time due."""

    def __init__(self, minutes: float, *, clock: Callable[[], float] = monotonic) -> None:
        self.seconds, self.clock = 60 * minutes, clock
        self._last = clock()

    def __call__(self, _: Position) -> bool:
        if not self.seconds or self.clock() - self._last < self.seconds:
            return False
        self._last = self.clock()
        return True
