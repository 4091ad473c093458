"""Training on windows in the order of time: when to evaluate, and which window comes next without any training on it.

Shapes: S windows of a stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..data.yambda.loader import StreamOrder
from .loop import Position
from .watch import Due


def after_windows(order: StreamOrder, windows: int) -> Due:
    """Due at the end of every `windows` windows; 0 means never."""
    seams = frozenset(seams_of(order, windows))
    return lambda at: at.batch in seams


def seams_of(order: StreamOrder, windows: int) -> list[int]:
    """The batch counts at which every `windows` windows end, ascending; an empty window ends with the one before."""
    if not windows:
        return []
    return sorted({int(seam) for seam in order.seams_S[windows - 1 :: windows]} - {0})


def interval(share: float, samples: int, batch_size: int) -> int:
    """Steps until that share of all samples is trained on, at least one."""
    return max(1, math.ceil(share * samples / batch_size))


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """When to evaluate: at the ends of windows, or every `steps` steps. Not before `first_step`.

    The end of training is evaluated in any case, so it is never among these.
    """

    seams: tuple[int, ...] = ()
    steps: int = 0
    first_step: int = 0

    def __call__(self, at: Position) -> bool:
        by_window = at.batch in self.seams
        return at.step >= self.first_step and (by_window or (self.steps > 0 and at.step % self.steps == 0))


def next_window(order: StreamOrder, at: Position) -> int | None:
    """The first window whose anchors are in no batch so far; none where the data ends."""
    if at.batch == 0 and at.step == 0:
        return order.windows[0]
    done = at.batch or len(order)
    last = max(order.last_place(done - 1), int(np.searchsorted(order.seams_S, done, side="right")) - 1)
    after = order.windows[last] + 1
    occupied = np.flatnonzero(order.index.counts("all")[after:])
    return after + int(occupied[0]) if len(occupied) else None
