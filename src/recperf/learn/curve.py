"""The learning curve: scores after training on parts of the rows, and what twice the rows would give. Torch-free."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

from ..jsonfile import Number, Struct
from .gains import Gain, Scored

SHARES = (0.25, 0.5)
"""Parts of the training rows that are trained on beside all of them."""
DRAWS = 2000


class CurvePoint(Struct):
    """The leading metric after training on a part of the rows."""

    share: Number
    value: Number
    """Higher is better."""
    seeds: int


class LearningCurve(Struct):
    """The scores of parts of the training rows, the smallest first, and what twice the rows would give."""

    points: list[CurvePoint]
    last: Gain
    """What all rows gain over half of them."""
    doubled: Gain
    """What twice the rows would gain, if steps shrink as they did; predicted, not measured."""


def next_step(quarter: float, half: float, whole: float) -> float:
    """What the next doubling gains where each gains the same share of the one before, as with a power of the number of
    rows; never more than the last one."""
    before, last = half - quarter, whole - half
    return last * min(1.0, max(0.0, last / before)) if before > 0 else last


def doubled(parts: Sequence[Scored], seeds: tuple[float, int]) -> Gain:
    """What twice the rows would gain, of the scores of a quarter, half and all of them. Its interval is that of draws
    over users and seeds; `seeds` are the variance over seeds and its degrees of freedom."""
    common = sorted(set.intersection(*(set(one.values) for one in parts)))
    value = next_step(*(statistics.fmean(one.values[seed] for seed in common) for one in parts))
    variance, freedom = seeds
    if not freedom:
        return Gain(value=value, low=-1.0, high=1.0, chance=1.0, seeds=len(common))
    users = [
        list(zip(*(one.replicates[seed] for seed in common if seed in one.replicates))) or [tuple(one.values.values())]
        for one in parts
    ]
    draw, size, steps = random.Random(0), min(map(len, users)), []
    for _ in range(DRAWS):
        place = draw.randrange(size)
        # A variance of few degrees of freedom may be much larger.
        deviation = math.sqrt(variance * freedom / draw.gammavariate(freedom / 2, 2) / len(common))
        steps.append(next_step(*(statistics.fmean(rows[place]) + draw.gauss(0, deviation) for rows in users)))
    steps.sort()
    below = sum(step <= 0 for step in steps) / DRAWS
    return Gain(
        value=value, low=steps[round(0.025 * DRAWS)], high=steps[round(0.975 * DRAWS) - 1],
        chance=2 * min(below, 1 - below), seeds=len(common),
    )  # fmt: skip
