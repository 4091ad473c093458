"""After which steps of a training to evaluate or to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


SAVE_SHARE = 0.05
"""Share of the time that saves every some minutes may take."""


class Minutes:
    """Due every `minutes` minutes since the last save; 0 means never. Less often if saves would take more than
    SAVE_SHARE of the time, which `notice` says once."""

    def __init__(
        self,
        minutes: float,
        *,
        notice: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.seconds = self._interval = 60 * minutes
        self.clock, self.notice = clock, notice
        self._last = clock()
        self._announced = False

    def __call__(self, _: Position | None = None) -> bool:
        return bool(self.seconds) and self.clock() - self._last >= self._interval

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a save, after which the minutes count anew."""
        began = self.clock()
        yield
        self._last = self.clock()
        cost = self._last - began
        self._interval = max(self.seconds, cost / SAVE_SHARE)
        if 0 < self.seconds < self._interval and not self._announced:
            self._announced = True
            self.notice(
                f"a save takes {cost:.1f} s: the next is due after {self._interval:.0f} s, so that saves take at most "
                f"{100 * SAVE_SHARE:.0f} % of the time"
            )
