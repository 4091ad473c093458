"""Learning-rate schedules: the rate of a step as a pure function of its number, counted from 0."""

from __future__ import annotations

import math
from collections.abc import Callable

from .config import DLRMTrainConfig

FLOOR = 1e-7
"""The quadratic decay stops here, as in the public DLRM."""


def one_cycle(step: int, total: int, *, peak: float, rise: float) -> float:
    """A cosine from peak / 25 up to the peak, then one down to peak / 250,000."""
    start, end = peak / 25, peak / 250_000
    top = max(1.0, rise * total - 1)
    if step <= top:
        return _cosine(start, peak, step / top)
    return _cosine(peak, end, min(1.0, (step - top) / max(1.0, total - 1 - top)))


def _cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * share)) / 2


def warmup_decay(step: int, *, peak: float, warmup: int, decay_start: int, decay_steps: int) -> float:
    """A linear warm-up over `warmup` steps, the peak, then a quadratic decay over `decay_steps` to a constant.

    Like the public DLRM this counts steps from 1, so that the first step has a rate above 0.
    """
    count = step + 1
    if count < warmup:
        return peak * count / warmup
    if not decay_steps or count < decay_start:
        return peak
    left = max(1, decay_start + decay_steps - count)
    return max(min(FLOOR, peak), peak * (left / decay_steps) ** 2)


def make(config: DLRMTrainConfig, planned: int) -> Callable[[int], float]:
    """The schedule of a config, for a training of `planned` steps."""
    peak = config.learning_rate
    if config.schedule == "constant":
        return lambda step: peak
    if config.schedule == "one-cycle":
        return lambda step: one_cycle(step, planned, peak=peak, rise=config.rise)
    return lambda step: warmup_decay(
        step, peak=peak, warmup=config.warmup_steps, decay_start=config.decay_start, decay_steps=config.decay_steps
    )
