"""How many samples reach the quality target, how long that takes and what it costs, each with its error band."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from ..config import within
from .predict import Prediction
from .work import NO_STALLS, Evaluations, Spread

EVALUATED = ("input", "transfer", "ids all-to-all", "lookup", "rows all-to-all", "dense forward")
"""Parts of a step that an evaluation has too."""


class Band(Struct, frozen=True):
    """A figure and the range that should contain the truth."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Band:
        return Band(factor * self.value, factor * self.low, factor * self.high)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples to the quality target."""

    count: Band
    origin: str
    extrapolated: bool = False


class Training(Struct, frozen=True, kw_only=True):
    """A training to the target, its evaluations and its start included."""

    samples: Band
    origin: str
    """Where the number of samples comes from."""
    extrapolated: bool
    seconds: Band
    steps_seconds: float
    """Seconds of its steps, with stalls."""
    evaluations: float
    """Number of its evaluations."""
    evaluations_seconds: float
    """Seconds of its evaluations, with stalls."""
    startup_seconds: float
    """Seconds before the first step."""
    cost: Band | None = None
    """Price of it, where that of a device is known."""


def samples_to_target(
    published: Mapping[int, Spread], global_batch: int, requested: float | None = None
) -> Samples | None:
    """The requested number, or one from the published numbers by global batch size; None where nothing is known."""
    if requested is not None:
        within(1.0, requested, 1e18, "samples to target")
        return Samples(count=Band(requested, requested, requested), origin="--samples-to-target")
    if not published:
        return None
    points = ", ".join(f"{runs.mean / 1e6:.1f} M at {batch:,}" for batch, runs in sorted(published.items()))
    origin = f"published means by global batch: {points}; the range is that of the runs"
    least, mean, most = (_interpolated({b: runs[n] for b, runs in published.items()}, global_batch) for n in range(3))
    if global_batch in published:
        return Samples(count=Band(mean, least, most), origin=origin)
    if min(published) <= global_batch <= max(published):
        return Samples(count=Band(mean, least, most), origin=f"{origin}, interpolated in the logarithm of the batch")
    # A larger batch never needs fewer samples, nor more steps.
    nearest = min(published) if global_batch < min(published) else max(published)
    steps = global_batch / nearest
    low, high = (published[nearest].least * min(1.0, steps), published[nearest].most * max(1.0, steps))
    origin += "; extrapolated beyond them: the range reaches from as many samples to as many steps as at the nearest"
    return Samples(count=Band(mean, low, high), origin=origin, extrapolated=True)


def _interpolated(published: Mapping[int, float], global_batch: int) -> float:
    """A straight line in both logarithms through the two nearest points, also outside of them."""
    points = sorted(published.items())
    if len(points) == 1:
        return points[0][1]
    after = min(max(1, sum(batch < global_batch for batch, _ in points)), len(points) - 1)
    (low, low_count), (high, high_count) = points[after - 1 : after + 1]
    share = math.log(global_batch / low) / math.log(high / low)
    return float(low_count * (high_count / low_count) ** share)


def forward_seconds(plan: Prediction) -> float:
    """Seconds of a step of an evaluation."""
    return sum(plan.exposed[part] for part in EVALUATED)


def training(
    samples: Samples,
    step: Band,
    forward: float,
    global_batch: int,
    *,
    evaluations: Evaluations | None,
    startup: Spread,
    stalls: Spread = NO_STALLS,
) -> Training:
    """`step` and `forward` are the seconds of a step and of its forward pass. The spread of the convergence, the error
    of the step and that of the stalls are independent: their logarithms are added as squares. A longer start, and
    evaluations from the beginning instead of the first one that the rules ask for, are added to the upper end."""

    def evaluated(count: float, *, from_start: bool = False) -> float:
        if evaluations is None:
            return 0.0
        every = evaluations.every(global_batch)
        skipped = 0 if from_start else math.ceil(evaluations.first(global_batch) / every) - 1
        return max(1.0, count / every - skipped)

    evaluation = 0.0
    if evaluations is not None:
        evaluation = evaluations.fixed_s + math.ceil(evaluations.samples / global_batch) * forward

    def seconds(count: float, slower: float = 1.0, stalled: float = stalls.mean) -> float:
        worked = count / global_batch * step.value + evaluated(count) * evaluation
        return slower * stalled * worked + startup.mean

    count, value = samples.count, seconds(samples.count.value)
    low, high = (
        _combined(value, seconds(counted), seconds(count.value, slower), seconds(count.value, stalled=stalled))
        for counted, slower, stalled in (
            (count.low, step.low / step.value, stalls.least),
            (count.high, step.high / step.value, stalls.most),
        )
    )
    earlier = max(0.0, evaluated(count.value, from_start=True) - evaluated(count.value))
    later = startup.most - startup.mean + stalls.mean * earlier * evaluation
    return Training(
        samples=count,
        origin=samples.origin,
        extrapolated=samples.extrapolated,
        seconds=Band(value, value / low - (startup.mean - startup.least), value * high + later),
        steps_seconds=stalls.mean * count.value / global_batch * step.value,
        evaluations=evaluated(count.value),
        evaluations_seconds=stalls.mean * evaluated(count.value) * evaluation,
        startup_seconds=startup.mean,
    )


def _combined(value: float, *others: float) -> float:
    """The factor by which independent deviations change a value together."""
    return math.exp(math.hypot(*(math.log(other / value) for other in others)))


def cost(seconds: Band, ranks: int, price: float) -> Band:
    """Price of a training at a price for one device and hour."""
    within(0.0, price, 1e9, "price")
    return seconds.times(ranks * price / 3600)
