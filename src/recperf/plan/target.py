"""How many samples reach the quality target, how long that takes and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..config import within


@dataclass(frozen=True, kw_only=True)
class Samples:
    count: float
    origin: str


def samples_to_target(published: Mapping[int, float], global_batch: int, given: float | None = None) -> Samples | None:
    """The given number, or one from the published numbers by global batch size; None where nothing is known."""
    if given is not None:
        within(1.0, given, 1e18, "samples to target")
        return Samples(count=given, origin="given")
    if not published:
        return None
    points = ", ".join(f"{count / 1e6:.1f} M at {batch:,}" for batch, count in sorted(published.items()))
    origin = f"published by global batch: {points}"
    if global_batch in published:
        return Samples(count=published[global_batch], origin=origin)
    if min(published) <= global_batch <= max(published):
        origin += "; interpolated in the logarithm of the batch"
    else:
        origin += "; extrapolated beyond them, so unreliable"
    return Samples(count=_interpolated(published, global_batch), origin=origin)


def _interpolated(published: Mapping[int, float], global_batch: int) -> float:
    """A straight line in both logarithms through the two nearest points, also outside of them."""
    points = sorted(published.items())
    if len(points) == 1:
        return points[0][1]
    after = min(max(1, sum(batch < global_batch for batch, _ in points)), len(points) - 1)
    (low, low_count), (high, high_count) = points[after - 1 : after + 1]
    share = math.log(global_batch / low) / math.log(high / low)
    return float(low_count * (high_count / low_count) ** share)


def hours(samples: float, samples_per_s: float) -> float:
    return samples / samples_per_s / 3600


def cost(hours_: float, ranks: int, price: float) -> float:
    """Price of the training at a price for one device and hour."""
    within(0.0, price, 1e9, "price")
    return hours_ * ranks * price
