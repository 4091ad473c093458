"""How many samples reach the quality target, how long that takes and what it costs, each with its error band."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from ..config import within
from .predict import Band, PredictedStep
from .work import NO_STALLS, Evaluations, Spread

EVALUATED = ("input", "transfer", "ids all-to-all", "lookup", "rows all-to-all", "dense forward")
"""Parts of a step that an evaluation has too."""
OVERFLOW = 700.0
"""Largest argument of `exp`: beyond it a cluster that fails makes no progress."""


class TargetSamples(Band, kw_only=True):
    """Samples to the quality target."""

    origin: str
    """Where the number comes from."""
    extrapolated: bool = False


class PlannedTraining(Struct, frozen=True, kw_only=True):
    """A training to the target, its evaluations and its start included."""

    samples: TargetSamples
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


class Failures(Struct, kw_only=True):
    """A cluster whose devices fail: its goodput, and how often it should write a checkpoint."""

    mtbf_s: float
    """Mean seconds between two failures of the whole cluster."""
    interval_s: float
    """Seconds of training between two checkpoints with the best goodput, nearly: sqrt(2 C M), by Young and Daly."""
    goodput: float
    """Share of the elapsed time that is training and is not lost."""


def samples_to_target(
    published: Mapping[int, Spread], global_batch: int, requested: float | None = None
) -> TargetSamples | None:
    """The requested number, or one from the published numbers by global batch size; None where nothing is known."""
    if requested is not None:
        within(1.0, requested, 1e18, "samples to target")
        return TargetSamples(requested, requested, requested, origin="--samples-to-target")
    if not published:
        return None
    points = ", ".join(f"{runs.mean / 1e6:.1f} M at {batch:,}" for batch, runs in sorted(published.items()))
    origin = f"published means by global batch: {points}; the range is that of the runs"
    least, mean, most = (_interpolated({b: runs[n] for b, runs in published.items()}, global_batch) for n in range(3))
    if global_batch in published:
        return TargetSamples(mean, least, most, origin=origin)
    if min(published) <= global_batch <= max(published):
        return TargetSamples(mean, least, most, origin=f"{origin}, interpolated in the logarithm of the batch")
    # A larger batch never needs fewer samples, nor more steps.
    nearest = min(published) if global_batch < min(published) else max(published)
    steps = global_batch / nearest
    low, high = (published[nearest].least * min(1.0, steps), published[nearest].most * max(1.0, steps))
    origin += "; extrapolated beyond them: the range reaches from as many samples to as many steps as at the nearest"
    return TargetSamples(mean, low, high, origin=origin, extrapolated=True)


def _interpolated(published: Mapping[int, float], global_batch: int) -> float:
    """A straight line in both logarithms through the two nearest points, also outside of them."""
    points = sorted(published.items())
    if len(points) == 1:
        return points[0][1]
    after = min(max(1, sum(batch < global_batch for batch, _ in points)), len(points) - 1)
    (low, low_count), (high, high_count) = points[after - 1 : after + 1]
    share = math.log(global_batch / low) / math.log(high / low)
    return float(low_count * (high_count / low_count) ** share)


def forward_seconds(step: PredictedStep) -> float:
    """Seconds of the parts of a step that an evaluation has too."""
    return sum(step.exposed[part] for part in EVALUATED)


def training(
    samples: TargetSamples,
    step: Band,
    forward: float,
    global_batch: int,
    *,
    evaluations: Evaluations | None,
    startup: Spread,
    stalls: Spread = NO_STALLS,
    hourly: float | None = None,
) -> PlannedTraining:
    """`step` and `forward` are the seconds of a step and of its forward pass, `hourly` is the price of all devices.

    The spread of the convergence, the error of the step and that of the stalls are independent: their logarithms are
    added as squares. A longer start, and evaluations from the beginning instead of the first one that the rules ask
    for, are added to the upper end."""

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

    value = seconds(samples.value)
    low, high = (
        _combined(value, seconds(counted), seconds(samples.value, slower), seconds(samples.value, stalled=stalled))
        for counted, slower, stalled in (
            (samples.low, step.low / step.value, stalls.least),
            (samples.high, step.high / step.value, stalls.most),
        )
    )
    earlier = max(0.0, evaluated(samples.value, from_start=True) - evaluated(samples.value))
    later = startup.most - startup.mean + stalls.mean * earlier * evaluation
    whole = Band(value, value / low - (startup.mean - startup.least), value * high + later)
    return PlannedTraining(
        samples=samples,
        seconds=whole,
        steps_seconds=stalls.mean * samples.value / global_batch * step.value,
        evaluations=evaluated(samples.value),
        evaluations_seconds=stalls.mean * evaluated(samples.value) * evaluation,
        startup_seconds=startup.mean,
        cost=None if hourly is None else whole.times(hourly / 3600),
    )


def _combined(value: float, *others: float) -> float:
    """The factor by which independent deviations change a value together."""
    return math.exp(math.hypot(*(math.log(other / value) for other in others)))


def failures(mtbf_s: float, checkpoint_s: float, restart_s: float) -> Failures:
    """The expected goodput by Daly's complete model: training runs for `interval_s`, then a checkpoint blocks it for
    `checkpoint_s`. Failures are a Poisson process; each loses everything since the last complete checkpoint, and
    training resumes `restart_s` later, unless another failure comes first."""
    within(1e-3, mtbf_s, 1e12, "mtbf")
    within(0.0, checkpoint_s, 1e9, "checkpoint seconds")
    within(0.0, restart_s, 1e9, "restart seconds")
    interval_s = max(1e-3, math.sqrt(2 * checkpoint_s * mtbf_s))
    restart, segment = restart_s / mtbf_s, (interval_s + checkpoint_s) / mtbf_s
    goodput = 0.0
    if restart + segment <= OVERFLOW:
        goodput = interval_s / (math.exp(restart) * mtbf_s * math.expm1(segment))
    return Failures(mtbf_s=mtbf_s, interval_s=interval_s, goodput=goodput)
