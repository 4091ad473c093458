"""How many samples reach the quality target, how long that takes and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..config import within
from ..models.dlrm_v4.config import DLRMv4Config

PUBLISHED = {8192: 69.3e6, 16384: 87.7e6, 32768: 113.0e6}
"""Mean samples to AUC 0.75 by global batch size, of twenty published runs each."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    count: float
    origin: str


def samples_to_target(config: Any, global_batch: int, given: float | None = None) -> Samples | None:
    """None where nothing is known: only DLRMv4's published target has published counts."""
    if given is not None:
        within(1.0, given, 1e18, "samples to target")
        return Samples(count=given, origin="given")
    model = getattr(config, "model", None)
    if not isinstance(model, DLRMv4Config) or model.row_scale != 1 or config.target.auc != 0.75:
        return None
    inside = min(PUBLISHED) <= global_batch <= max(PUBLISHED)
    told = "published: 69.3, 87.7 and 113.0 M at batches of 8,192, 16,384 and 32,768"
    if global_batch in PUBLISHED:
        return Samples(count=PUBLISHED[global_batch], origin=told)
    how = "interpolated in the logarithm of the batch" if inside else "extrapolated beyond them: trust it little"
    return Samples(count=interpolated(global_batch), origin=f"{told}; {how}")


def interpolated(global_batch: int) -> float:
    """Straight in the logarithms of both, by the nearest two points also outside of them."""
    known = sorted(PUBLISHED.items())
    pair = known[:2] if global_batch <= known[1][0] else known[1:]
    (low, before), (high, after) = pair
    share = math.log(global_batch / low) / math.log(high / low)
    return float(before * (after / before) ** share)


def hours(samples: float, samples_per_s: float) -> float:
    return samples / samples_per_s / 3600


def cost(hours_: float, ranks: int, price: float) -> float:
    """Of so many devices for so long, at a price a device and hour."""
    within(0.0, price, 1e9, "price")
    return hours_ * ranks * price
