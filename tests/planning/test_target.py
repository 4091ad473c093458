"""Samples, time and cost to the target, and the goodput of a cluster that fails, worked out by hand."""

from __future__ import annotations

import math

import pytest
from toy_plan import PLAIN, WIRES, workload

from recperf.planning import target
from recperf.planning.predict import Band, predict
from recperf.planning.target import TargetSamples
from recperf.planning.work import NO_STALLS, STARTUP_S, Evaluations, Spread

PUBLISHED = {100: Spread(1e6, 2e6, 4e6), 400: Spread(2e6, 8e6, 16e6), 1600: Spread(4e6, 8e6, 64e6)}
EVALUATIONS = Evaluations(samples=950, every=lambda batch: 10 * batch, first=lambda batch: 25 * batch, fixed_s=3.0)


@pytest.mark.parametrize(
    ("batch", "value", "low", "high", "extrapolated"),
    [
        (100, 2e6, 1e6, 4e6, False),
        (400, 8e6, 2e6, 16e6, False),
        (1600, 8e6, 4e6, 64e6, False),
        # Half way in the logarithm: geometric means.
        (200, 4e6, math.sqrt(2) * 1e6, 8e6, False),
        (800, 8e6, math.sqrt(8) * 1e6, 32e6, False),
        # On the line through the nearest two; from as many samples to as many steps as at the nearest.
        (3200, 8e6, 4e6, 128e6, True),
        (50, 1e6, 0.5e6, 4e6, True),
    ],
)
def test_samples_lie_on_lines_between_published_runs(
    batch: int, value: float, low: float, high: float, extrapolated: bool
) -> None:
    samples = target.samples_to_target(PUBLISHED, batch)
    assert samples is not None
    assert (samples.value, samples.low, samples.high) == pytest.approx((value, low, high), rel=1e-12)
    assert samples.extrapolated == extrapolated
    one = target.samples_to_target({100: PUBLISHED[100]}, batch)
    assert one is not None
    assert one.value == 2e6
    assert target.samples_to_target({}, batch) is None


def test_a_training_is_steps_evaluations_and_a_start() -> None:
    """1,000 steps of 2 s; evaluated every tenth step from the third time on: 98 times 10 x 0.5 + 3 s."""
    samples, step = TargetSamples(1e5, 0.5e5, 2e5, origin=""), Band(2.0, 1.0, 5.0)
    stalls, startup = Spread(1.0, 1.5, 3.0), Spread(10.0, 20.0, 120.0)
    whole = target.training(
        samples, step, 0.5, 100, evaluations=EVALUATIONS, startup=startup, stalls=stalls, hourly=36.0
    )
    assert (whole.evaluations, whole.startup_seconds) == (98.0, 20.0)
    assert (whole.steps_seconds, whole.evaluations_seconds) == (1.5 * 2000, 1.5 * 98 * 8)
    value = 1.5 * (2000 + 98 * 8) + 20
    assert whole.seconds.value == pytest.approx(value)
    # One thing at a time: half the samples, a step of 1 s, no stalls; twice, 5 s, twice the stalls.
    low = [1.5 * (1000 + 48 * 8) + 20, 0.5 * 1.5 * 2784 + 20, 1.0 * 2784 + 20]
    high = [1.5 * (4000 + 198 * 8) + 20, 2.5 * 1.5 * 2784 + 20, 3.0 * 2784 + 20]
    less, more = (math.exp(math.sqrt(sum(math.log(one / value) ** 2 for one in ends))) for ends in (low, high))
    assert whole.seconds.low == pytest.approx(value / less - 10)
    # Two evaluations more from the beginning on, and a start that is 100 s longer.
    assert whole.seconds.high == pytest.approx(value * more + 100 + 1.5 * 2 * 8)
    assert whole.cost is not None
    assert whole.cost.value == pytest.approx(whole.seconds.value / 100)
    assert whole.cost.factors == pytest.approx(whole.seconds.factors)


def test_a_training_has_one_evaluation_at_least_and_none_where_none_is_known() -> None:
    samples, step = TargetSamples(500.0, 500.0, 500.0, origin=""), Band(2.0, 2.0, 2.0)
    startup = Spread(0.0, 0.0, 0.0)
    short = target.training(samples, step, 0.5, 100, evaluations=EVALUATIONS, startup=startup)
    assert (short.evaluations, short.seconds.value) == (1.0, 10.0 + 8.0)
    assert (short.seconds.low, short.seconds.high, short.cost) == (pytest.approx(18.0), pytest.approx(18.0), None)
    none = target.training(samples, step, 0.5, 100, evaluations=None, startup=STARTUP_S)
    assert (none.evaluations, none.evaluations_seconds, none.seconds.value) == (0.0, 0.0, 35.0)
    assert STARTUP_S == (25.0, 25.0, 25.0)
    assert NO_STALLS == (1.0, 1.0, 1.0)
    exact = Evaluations(samples=900, every=lambda batch: 100, first=lambda batch: 200)
    # Exactly at the second time: one is skipped; 9 batches of 100.
    assert target.training(samples, step, 0.5, 100, evaluations=exact, startup=startup).seconds.value == 10 + 4 * 4.5


def test_an_evaluation_has_the_forward_parts_of_a_step() -> None:
    step = predict(workload(), 2, PLAIN, WIRES).step
    names = ("input", "transfer", "ids all-to-all", "lookup", "rows all-to-all", "dense forward")
    assert target.forward_seconds(step) == pytest.approx(sum(step.exposed[name] for name in names))


@pytest.mark.parametrize(
    ("mtbf", "checkpoint", "restart", "interval"), [(5000.0, 1.0, 10.0, 100.0), (20_000.0, 4.0, 0.0, 400.0)]
)
def test_checkpoints_come_every_square_root_of_twice_their_cost_by_the_mtbf(
    mtbf: float, checkpoint: float, restart: float, interval: float
) -> None:
    """Young and Daly: sqrt(2 C M), at which the expected goodput is highest."""
    failing = target.failures(mtbf, checkpoint, restart)
    assert (failing.mtbf_s, failing.interval_s) == (mtbf, pytest.approx(interval, rel=1e-12))

    def goodput(seconds: float) -> float:
        return seconds / (mtbf * math.exp(restart / mtbf) * (math.exp((seconds + checkpoint) / mtbf) - 1))

    assert failing.goodput == pytest.approx(goodput(interval), rel=1e-9)
    best = max((interval * factor / 20 for factor in range(4, 80)), key=goodput)
    assert best == pytest.approx(interval, rel=0.06), "nearly the best"


def test_a_cluster_that_fails_all_the_time_trains_nothing() -> None:
    assert target.failures(1.0, 0.0, 1.0).interval_s == 1e-3
    ends = [target.failures(1.0, 1.0, restart) for restart in (697.58, 697.59)]
    # 1 + sqrt(2) seconds of a piece and the restart: 700 mean times between failures are the end.
    assert ends[0].goodput == pytest.approx(math.sqrt(2) * math.exp(-697.58) / math.expm1(1 + math.sqrt(2)))
    assert ends[1].goodput == 0.0
