"""How much better one config is than another: paired over the same held-out users. Torch-free.

A training with another seed differs too. That variance is pooled over all configs that were trained with several seeds,
since few seeds of one config hardly tell it. Means over all seeds of each are compared: one seed may be a lucky one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..jsonfile import Number, Struct


class Gain(Struct):
    """A difference in the leading metric, higher is better, with its 95 % interval."""

    value: Number
    low: Number
    high: Number
    chance: Number
    """How likely so large a difference is where there is none, before a correction for several experiments."""
    seeds: int
    """Seeds of the config that was tried."""

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 0."""
        return not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Scored:
    """The leading metric of trainings with one config, by seed, higher is better."""

    values: Mapping[int, float]
    replicates: Mapping[int, Sequence[float]]
    """The same in bootstrap replicates, which draw the same users for every training."""
    chosen: Mapping[int, float]
    """The choosing metric, higher is better."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def mean_chosen(self) -> float:
        return statistics.fmean(self.chosen.values())


def pooled(groups: Iterable[Iterable[float]]) -> tuple[float, int]:
    """The variance over seeds, of all configs together, and its degrees of freedom."""
    squares, freedom = 0.0, 0
    for group in map(list, groups):
        if len(group) > 1:
            mean = statistics.fmean(group)
            squares += sum((value - mean) ** 2 for value in group)
            freedom += len(group) - 1
    return (squares / freedom if freedom else 0.0), freedom


def gain(new: Scored, old: Scored, seeds: tuple[float, int]) -> Gain:
    """The second config less the first; `seeds` are the variance over seeds and its degrees of freedom."""
    mine, theirs, value = _mean_replicates(new), _mean_replicates(old), new.mean - old.mean
    users = statistics.variance(one - other for one, other in zip(mine, theirs)) if len(mine) > 1 else 0.0
    variance, freedom = seeds
    between = variance * (1 / len(new.values) + 1 / len(old.values))
    whole = users + between
    error = math.sqrt(whole)
    if not freedom or not error:
        # Nothing is known of how seeds differ.
        return Gain(value=value, low=-1.0, high=1.0, chance=1.0, seeds=len(new.values))
    # Satterthwaite's degrees of freedom of a sum of two variances.
    effective = whole**2 / (between**2 / freedom + users**2 / max(1, len(mine) - 1))
    half = error * quantile(0.975, effective)
    chance = 2 * (1 - cumulative(abs(value) / error, effective))
    return Gain(value=value, low=value - half, high=value + half, chance=min(1.0, chance), seeds=len(new.values))


def _mean_replicates(scored: Scored) -> list[float]:
    return [statistics.fmean(column) for column in zip(*scored.replicates.values())]


def holm(chances: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of several differences are there, so that all are right with a probability of 95 %."""
    order = sorted(range(len(chances)), key=lambda place: chances[place])
    there = [False] * len(chances)
    for rank, place in enumerate(order):
        if chances[place] > level / (len(chances) - rank):
            break
        there[place] = True
    return there


STEPS = 400


def cumulative(t: float, freedom: float) -> float:
    """Student's distribution, by Simpson's rule; t is positive."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def density(x: float) -> float:
        return float(scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2))

    width = t / STEPS
    inner = sum((4 if step % 2 else 2) * density(step * width) for step in range(1, STEPS))
    return 0.5 + width / 3 * (density(0.0) + inner + density(t))


def quantile(share: float, freedom: float) -> float:
    """The value below which this share of Student's distribution lies, above its middle."""
    low, high = 0.0, 700.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cumulative(middle, freedom) < share else (low, middle)
    return high
