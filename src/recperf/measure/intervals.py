"""95 % intervals of shares, from samples of a stack and from traced steps. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import sqrt

NORMAL = 1.96
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for an interval of 95 %, by degrees of freedom from 1."""
GROUPS = 8
"""Fewer steps than this do not tell how much steps differ: then each sample is on its own."""

Interval = tuple[float, float]


def of_samples(inside: Sequence[tuple[int, float]], every: Sequence[tuple[int, float]]) -> Interval:
    """The interval of a share of sampled time. Both are (step, weight) of samples: those inside, and all of them.

    It is Wilson's for as many samples as would vary as these do: samples differ in weight, and those of one step are
    alike. The low end is also that of the number of samples inside: where one sample is all, it may be chance.
    """
    parts, wholes = defaultdict[int, float](float), defaultdict[int, float](float)
    weights = [weight for _, weight in inside]
    whole, squares = sum(weight for _, weight in every), sum(weight * weight for _, weight in every)
    if whole <= 0:
        return 0.0, 1.0
    for times, one in ((parts, inside), (wholes, every)):
        for step, weight in one:
            times[step] += weight
    share = min(1.0, sum(weights) / whole)
    count = whole * whole / squares
    if len(wholes) >= GROUPS:
        varies = sum((parts[step] - share * wholes[step]) ** 2 for step in wholes) / whole**2
        varies *= len(wholes) / (len(wholes) - 1)
        count = min(count, share * (1 - share) / varies) if varies > 0 else count
    low, high = wilson(share, count)
    alike = sum(weights) ** 2 / max(1e-9, sum(weight * weight for weight in weights))
    return min(low, share * _least(alike)), high


def _least(count: float) -> float:
    """The low end of the interval of a rate that so many events were seen of, as part of it (Wilson and Hilferty)."""
    return max(0.0, 1 - 1 / (9 * count) - NORMAL / (3 * sqrt(count))) ** 3 if count else 0.0


def wilson(share: float, count: float) -> Interval:
    """The interval of a share that was seen in so many samples."""
    if count <= 0:
        return 0.0, 1.0
    square = NORMAL**2 / count
    middle = (share + square / 2) / (1 + square)
    half = NORMAL * sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def of_steps(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """The interval of a share from its time in each of some steps; nothing is known from a single step."""
    count, whole = len(wholes), sum(wholes)
    if count < 2 or whole <= 0:
        return 0.0, 1.0
    share = sum(parts) / whole
    varies = sum((part - share * one) ** 2 for part, one in zip(parts, wholes, strict=True))
    half = STUDENT[min(count - 2, len(STUDENT) - 1)] * sqrt(count / (count - 1) * varies) / whole
    return max(0.0, share - half), min(1.0, share + half)
