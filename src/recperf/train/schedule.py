"""The learning rate of a step as a pure function of the step's number, counted from 0."""

from __future__ import annotations

from collections.abc import Callable

from .config import DLRMTrainConfig
from .optim import one_cycle

FLOOR = 1e-7
"""A quadratic fall stops here, as the public DLRM's does."""


def constant(step: int, *, peak: float) -> float:
    return peak


def warmup_decay(step: int, *, peak: float, warmup: int, decay_start: int, decay_steps: int) -> float:
    """A linear rise over `warmup` steps, the peak, then a quadratic fall over `decay_steps`, and its last value on.

    Like the public DLRM this counts steps from 1, so that the first step already has a rate above 0.
    """
    count = step + 1
    if count < warmup:
        return peak * count / warmup
    if not decay_steps or count < decay_start:
        return peak
    left = max(1, decay_start + decay_steps - count)
    return max(min(FLOOR, peak), peak * (left / decay_steps) ** 2)


def make(config: DLRMTrainConfig, planned: int) -> Callable[[int], float]:
    """The schedule a config names, for a training of so many planned steps."""
    peak = config.learning_rate
    if config.schedule == "constant":
        return lambda step: constant(step, peak=peak)
    if config.schedule == "one-cycle":
        return lambda step: one_cycle(step, planned, peak=peak, rise=config.rise)
    return lambda step: warmup_decay(
        step, peak=peak, warmup=config.warmup_steps, decay_start=config.decay_start, decay_steps=config.decay_steps
    )
