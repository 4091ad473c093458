"""A cluster whose devices fail: its goodput, and how often it should write a checkpoint.

Training runs for `interval_s`, then a checkpoint blocks it for `checkpoint_s`. Failures are a Poisson process. Each
loses everything since the last complete checkpoint; training resumes `restart_s` later, unless another failure comes
first. This is Daly's complete model, whose expected goodput has a closed formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import within

OVERFLOW = 700.0
"""Largest argument of `exp`: beyond it there is no progress."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    mtbf_s: float
    """Mean seconds between two failures of the whole cluster."""
    checkpoint_s: float
    """Seconds for which a checkpoint blocks the training."""
    restart_s: float
    """Seconds from a failure to the first step after it."""

    def __post_init__(self) -> None:
        within(1e-3, self.mtbf_s, 1e12, "mtbf")
        within(0.0, self.checkpoint_s, 1e9, "checkpoint seconds")
        within(0.0, self.restart_s, 1e9, "restart seconds")

    @property
    def interval_s(self) -> float:
        """Seconds of training between two checkpoints with the best goodput, nearly: sqrt(2 C M), by Young and Daly."""
        return max(1e-3, math.sqrt(2 * self.checkpoint_s * self.mtbf_s))

    def share(self, interval_s: float | None = None) -> float:
        """Share of the elapsed time that is training and is not lost."""
        interval = self.interval_s if interval_s is None else interval_s
        restart, segment = self.restart_s / self.mtbf_s, (interval + self.checkpoint_s) / self.mtbf_s
        if restart + segment > OVERFLOW:
            return 0.0
        return interval / (math.exp(restart) * self.mtbf_s * math.expm1(segment))


def of_devices(hours: float, ranks: int, checkpoint_s: float, restart_s: float) -> Goodput:
    """Goodput of a cluster of devices that each fail once in so many hours: they fail independently, and one failure
    stops all."""
    within(1e-6, hours, 1e9, "mtbf hours")
    return Goodput(mtbf_s=3600 * hours / ranks, checkpoint_s=checkpoint_s, restart_s=restart_s)
