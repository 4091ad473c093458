"""The figures of result.json, worked out by hand or by numpy."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import example_runs as examples
import msgspec
import numpy as np
import pytest

from recperf.measure.peaks.records import Peaks
from recperf.measure.profile_records import WorkloadFigures
from recperf.runs import derive
from recperf.runs.result import Difference, Evaluation, Quality, Target, Throughput, TrialResult
from recperf.runs.schemas import SavedScores, Timing
from recperf.tasks import CLICK_LABELS, NEXT_ITEM

NO_TARGET = Target(beat=None, accuracy=None, auc=None)


def timing(part: str, seconds: float, **more: Any) -> Timing:
    return Timing(kind="timing", seed=42, step=1, part=part, seconds=seconds, **more)


def test_throughput_and_percentiles_are_those_of_the_stretches() -> None:
    times = [10.0, 11.0, 9.0, 30.0, 12.0, 13.0, 10.5]
    timed = [
        timing("warmup", 1.0, steps=2, samples=200, shuffle_s=0.25),
        timing("steady", 2.0, steps=3, samples=900, batch=300, shuffle_s=0.5, step_ms=tuple(times[:3])),
        timing("evaluation", 0.5),
        timing("steady", 3.0, steps=4, samples=1100, batch=300, step_ms=tuple(times[3:])),
        timing("save", 0.125),
    ]
    speed = derive.speed_of(timed)
    assert msgspec.to_builtins(speed["steady"]) == {"samples_per_s": 400.0, "samples": 2000, "steps": 7, "seconds": 5.0}
    assert msgspec.to_builtins(speed["overall"]) == {
        "samples_per_s": pytest.approx(2200 / 6.625), "samples": 2200, "steps": 9, "seconds": 6.625, "steady_s": 5.0,
        "warmup_s": 1.0, "evaluation_s": 0.5, "save_s": 0.125, "shuffle_s": 0.75,
    }  # fmt: skip
    step = speed["step_ms"]
    assert [step.p20, step.p50, step.p80] == pytest.approx(np.percentile(times, [20, 50, 80]).tolist())


def test_few_steps_have_no_percentiles_and_none_have_no_throughput() -> None:
    for count, known in ((4, False), (5, True)):
        speed = derive.speed_of([timing("steady", 1.0, steps=9, samples=90, batch=10, step_ms=(100.0,) * count)])
        assert (speed["step_ms"] is not None) is known
        assert speed["steady"].samples_per_s == 90.0
        assert speed["difference"] is None
    nothing = derive.speed_of([timing("evaluation", 1.0)])
    assert [nothing[name] for name in ("steady", "overall", "step_ms", "difference")] == [None] * 4


def stretch(seconds: float, samples: int, times: list[float], **more: Any) -> str | None:
    """How one stretch differs from 100 samples per median step."""
    more = {"batch": 100, "steps": len(times), "step_ms": tuple(times), **more}
    text = derive.speed_of([timing("steady", seconds, samples=samples, **more)])["difference"]
    assert text is None or isinstance(text, str)
    return text


def test_a_difference_between_throughput_and_steps_is_divided_into_its_causes() -> None:
    # 10 s: 7 s in steps with a median of 60 and a mean of 70 ms, 0.2 s shuffling, 2.8 s between steps.
    slow = [60.0] * 60 + [85.0] * 40
    causes = [
        "batches have 70 samples on average",
        "the time between steps is 28%",
        "the mean step takes 1.17 times the median",
        "shuffling takes 2% of the time",
    ]
    assert stretch(10.0, 7000, slow, shuffle_s=0.2, other_work=0.15) == (
        f"58% below 100 samples per median step: {'; '.join(causes)}"
    )
    # In 8 s steps of 8.04 s: a clock's error leaves no time between them. The mean is 80.4 of a median of 100 ms.
    assert stretch(8.0, 10_000, [100.0] * 51 + [60.0] * 49) == (
        "25% above 100 samples per median step: the mean step takes 0.80 times the median"
    )
    # Causes of 1.5 % are left out, those of 3 % are not.
    assert "shuffling" not in (stretch(10.0, 10_000, [80.0] * 100, shuffle_s=0.15) or "shuffling")
    assert "shuffling takes 3%" in (stretch(10.0, 10_000, [80.0] * 100, shuffle_s=0.3) or "")


def test_other_work_is_weighted_by_time() -> None:
    times = (60.0,) * 50
    timed = [
        timing("steady", 7.0, steps=50, samples=5000, batch=100, step_ms=times, other_work=0.3),
        timing("steady", 3.0, steps=50, samples=5000, batch=100, step_ms=times, other_work=None),
    ]
    assert derive.speed_of(timed)["difference"].endswith("; other work took 21% of the cores")


@pytest.mark.parametrize(
    ("seconds", "said"), [(10.75, None), (9.35, None), (11.8, "15% below"), (8.7, "15% above"), (6.0, "67% above")]
)
def test_close_to_a_batch_per_median_step_is_no_difference(seconds: float, said: str | None) -> None:
    text = stretch(seconds, 10_000, [100.0] * 100)
    assert text is None if said is None else text is not None and text.startswith(said)


def profile(**fields: Any) -> WorkloadFigures:
    return msgspec.convert(examples.profile(**fields)["workload"], WorkloadFigures)


def test_the_budget_adds_up_the_components_of_a_part() -> None:
    rows = [("first", "forward", 0.25), ("second", "backward", 0.125), ("third", "backward", 0.5), ("last", "x", 0.125)]
    parts = [SimpleNamespace(name=f"unknown_{name}", phase=phase, share=share) for name, phase, share in rows]
    budget = derive.budget_of(SimpleNamespace(components=parts))  # type: ignore[arg-type]
    assert budget == {"unknown_first": 0.25, "backward": 0.625, "unknown_last": 0.125}
    assert derive.budget_of(SimpleNamespace(components=[])) is None  # type: ignore[arg-type]


def test_mfu_is_the_share_of_the_fastest_product() -> None:
    peaks = msgspec.convert(examples.peaks(), Peaks)
    steady = Throughput(samples_per_s=512_000.0, samples=1, steps=1, seconds=1.0)
    counted = profile(flops={"bottom": 1e6, "top": 3e6})
    # 4 MFLOP for 256 samples, of which 512,000 a second: 8 GFLOP/s of 70.
    assert derive.mfu(counted, peaks, steady) == pytest.approx(8 / 70)
    assert derive.mfu(counted, peaks, None) is None
    assert derive.mfu(counted, None, steady) is None
    assert derive.mfu(profile(precision="bfloat16"), peaks, steady) is None


def test_an_interval_is_the_middle_95_percent() -> None:
    ends = derive.interval([float(value) for value in range(1001)][::-1])
    assert (ends.low, ends.high) == (pytest.approx(25), pytest.approx(975))
    drawn = np.random.default_rng(1).normal(size=500)
    ends = derive.interval(drawn.tolist())
    assert [ends.low, ends.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]).tolist())


def test_seeds_are_drawn_again_in_every_replicate() -> None:
    assert derive.combined([[3.0, 1.0, 2.0]]) == [3.0, 1.0, 2.0]
    # What all seeds agree on stays, replicate by replicate.
    assert derive.combined([[3.0, 1.0, 2.0]] * 4) == [3.0, 1.0, 2.0]
    # Of seeds at 0 and 1 the mean of two drawn ones is 0, 1/2 or 1, with variance 1/8; a plain mean has none.
    for seeds, variance in (([0.0, 1.0], 1 / 8), ([0.0, 0.0, 1.0, 1.0], 1 / 16)):
        drawn = derive.combined([[value] * 4000 for value in seeds])
        assert len(drawn) == 4000
        assert statistics.fmean(drawn) == pytest.approx(0.5, abs=0.03)
        assert statistics.pvariance(drawn) == pytest.approx(variance, rel=0.1)
        assert len(set(drawn)) == len(seeds) + 1


def standing(*replicates: float) -> Difference:
    scores = {"rows": 5000, "rows_digest": "a", "by": "rows", "units": 5000}
    model = sampled(0.5, *replicates, rows_digest="a")
    rule = sampled(0.25, *[0.0] * len(replicates))
    (row,) = detailed({**scores, "seeds": {"1": model}, "baselines": {"rule": rule}}).differences
    return row


def detailed(scores: dict[str, Any], auc: float | None = 0.7, **baselines: dict[str, float]) -> Quality:
    metrics = {"log_loss": 0.5, "calibration_error": 0.02} | ({} if auc is None else {"auc": auc})
    quality = Quality(metrics=metrics, spread={}, seeds=[], target=NO_TARGET, met=False, baselines=baselines)
    derive.add_detail(CLICK_LABELS, quality, msgspec.convert(scores, SavedScores))
    return quality


def test_a_model_is_above_a_baseline_if_the_whole_interval_is() -> None:
    row = standing(*(value / 1000 for value in range(10, 210)))
    assert (row.standing, row.below_zero, row.seeds) == ("above", 0.0, 1)
    assert (row.low, row.high) == (pytest.approx(0.010 + 0.025 * 0.199), pytest.approx(0.010 + 0.975 * 0.199))
    assert standing(*(-value / 1000 for value in range(10, 210))).standing == "below"
    # 4 % of the replicates are negative: more than the 2.5 % below an interval of 95 %, fewer than the 10 % of 80 %.
    row = standing(*[-0.1] * 4, *[0.1] * 96)
    assert (row.standing, row.below_zero, row.difference) == ("level", 0.04, 0.25)
    assert standing(*[0.1] * 4, *[-0.1] * 96).standing == "level"
    # 1 %, on the other hand, are outside of it.
    assert standing(*[-0.1] * 1, *[0.1] * 99).standing == "above"
    zeros = standing(*[0.0] * 40)
    assert (zeros.standing, zeros.below_zero, zeros.low, zeros.high) == ("level", 0.0, 0.0, 0.0)


def test_where_an_interval_is_too_wide_the_number_of_users_that_would_tell_is_stated() -> None:
    # The interval of evenly spread replicates is 0.95 of their range.
    def compared(half: float, values: tuple[float, float], units: int, metric: str = "auc") -> Difference:
        spread = [half / 0.95 * value / 500 for value in range(-500, 501)]
        return derive.difference_to("rule", metric, values, [spread], [[0.0] * 1001], units=units, by="rows")

    # 5 % of what 0.7 is above chance are 0.01. Three times that half width takes nine times the rows.
    row = compared(0.03, (0.7, 0.68), 1000)
    assert (row.needed, row.units, row.by, row.difference) == (9000, 1000, "rows", pytest.approx(0.02))
    assert compared(0.0125, (0.68, 0.7), 1000).needed == 1600
    assert compared(0.0099, (0.7, 0.68), 1000).needed is None
    # 10 % of the better NDCG.
    assert compared(0.0216, (0.0271, 0.0520), 100, "ndcg_10").needed == 1800
    # A metric that leads no task has no such bound, and a clear difference needs nothing.
    assert compared(0.03, (0.7, 0.68), 1000, "log_loss").needed is None
    assert derive.difference_to("rule", "auc", (0.7, 0.6), [[0.1] * 9], [[0.0] * 9], units=9).needed is None
    assert [derive.round_up(count) for count in (1.2, 9.5, 10.0, 101.0, 1725.6, 99_400.0)] == [
        2, 10, 10, 110, 1800, 100_000
    ]  # fmt: skip


def sampled(auc: float | None, *replicates: float, **more: Any) -> dict[str, Any]:
    replicated = {"auc": list(replicates), **more.pop("probability_replicates", {})}
    return {"leading": auc, "replicates": replicated, **more}


SCORES = {
    "rows": 1000, "rows_digest": "a", "by": "users", "units": 77,
    "segments": {"new": {"rows": 20, "at_most": 3}, "rest": {"rows": 980, "at_most": 0, "counted": "events"}},
    "baselines": {
        "worst": sampled(0.0, *[0.0] * 9, segments={"new": 0.1}, probability_replicates={"log_loss": [9.0] * 9}),
        "rule": sampled(0.5, *[0.5] * 9, probability_replicates={"log_loss": [0.75] * 9}),
        "planted": sampled(1.0, *[1.0] * 9, probability_replicates={"log_loss": [0.1] * 9}),
    },
    "seeds": {
        "1": sampled(0.75, *[0.75] * 9, rows_digest="a", segments={"new": 0.25, "rest": 1.0},
                     probability_replicates={"log_loss": [0.5] * 9},
                     calibration=[{"predicted": 0.25, "observed": 0.5, "rows": 10}]),
        "2": sampled(0.25, *[0.75] * 9, rows_digest="a", segments={"new": 0.75},
                     probability_replicates={"log_loss": [0.5] * 9},
                     calibration=[{"predicted": 0.75, "observed": 0.0, "rows": 11}]),
        "3": sampled(0.9, *[0.75] * 9, rows_digest="others", segments={"new": 1.0}),
    },
}  # fmt: skip
LOSSES = {"worst": {"log_loss": 9.0}, "rule": {"log_loss": 0.75}, "planted": {"log_loss": 0.1}, "free": {"auc": 0.5}}


def test_baselines_are_compared_with_the_seeds_that_have_their_rows() -> None:
    quality = detailed(SCORES, **LOSSES)
    assert msgspec.to_builtins(quality.interval) == {
        "low": 0.75, "high": 0.75, "by": "users", "units": 77, "replicates": 9
    }  # fmt: skip
    rows = [(row.metric, row.baseline, row.difference, row.low, row.seeds) for row in quality.differences]
    assert rows == [("auc", "planted", -0.5, -0.25, 2), ("auc", "rule", 0.0, 0.25, 2), ("auc", "worst", 0.5, 0.75, 2)]
    best = derive.best_of(quality.differences)
    assert best is not None
    assert best.baseline == "rule"
    assert derive.best_of(quality.differences[:1]) is None
    assert quality.baseline_intervals is not None
    assert {name: ends.high for name, ends in quality.baseline_intervals.items()} == {
        "worst": 0.0, "rule": 0.5, "planted": 1.0
    }  # fmt: skip
    # Probabilities: against the lowest log loss of a rule that does not know what no model can.
    (row,) = quality.probabilities
    assert (row.metric, row.baseline, row.difference, row.low, row.standing) == (
        "log_loss", "rule", -0.25, -0.25, "below"
    )  # fmt: skip
    new, rest = quality.segments
    assert (new.auc, new.baselines, new.rows, new.at_most, new.ranking) == (0.5, {"worst": 0.1}, 20, 3, None)
    assert (rest.auc, rest.baselines, rest.counted) == (1.0, {}, "events")
    (bin,) = quality.calibration
    assert (bin.predicted, bin.observed, bin.rows) == (0.5, 0.25, 10)
    assert quality.ranking is None
    assert quality.warnings == ()
    assert detailed(SCORES).probabilities == ()
    assert derive.compared(CLICK_LABELS, quality) == quality.differences


def test_what_cannot_be_compared_is_left_out() -> None:
    others = detailed({**SCORES, "rows_digest": "b"}, **LOSSES)
    assert (others.differences, others.segments, others.calibration, others.baseline_intervals) == ((), (), (), None)
    assert others.interval is not None
    alone = detailed({**SCORES, "baselines": {}, "segments": {"none": {"rows": 0, "at_most": 1}}})
    assert (alone.differences, alone.baseline_intervals, alone.segments[0].auc) == ((), None, None)
    assert detailed({**SCORES, "seeds": {}}).interval is None
    unlabelled = {"1": sampled(None, rows_digest="a")}
    ranked_only = detailed({**SCORES, "seeds": unlabelled, "baselines": {}}, auc=None)
    assert (ranked_only.interval, ranked_only.warnings) == (None, ())
    # A model may rank everything the wrong way round.
    wrong = {"1": sampled(0.0, *[0.0] * 9, rows_digest="a")}
    (row,) = detailed({**SCORES, "seeds": wrong, "baselines": {"rule": sampled(0.5, *[0.5] * 9)}}).differences
    assert (row.difference, row.standing) == (-0.5, "below")


def ranked(ndcg: float, segments: dict[str, float] | None = None, **lists: float) -> dict[str, Any]:
    inner = {name: {"ndcg_10": value} for name, value in (segments or {}).items()}
    return {"metrics": {"ndcg_10": ndcg}, "segments": inner, "ndcg_replicates": [ndcg] * 9, "lists": lists}


def test_rankings_are_means_over_the_seeds() -> None:
    first = sampled(None, rows_digest="a", ranking=ranked(0.25, {"new": 0.5}, overlap=0.5))
    second = sampled(None, rows_digest="a", ranking=ranked(0.75, {"rest": 0.125}, overlap=1.0))
    facts = {"users": 7, "catalogue": 9, "negatives": 0, "baselines": {"low": ranked(0.125), "high": ranked(0.375)}}
    scores = {
        **SCORES, "baselines": {}, "ranking": facts, "not_ranked": "why",
        "seeds": {"1": first, "2": second, "3": sampled(None, rows_digest="a")},
    }  # fmt: skip
    quality = detailed(scores)
    ranking = quality.ranking
    assert ranking is not None
    assert (ranking.metrics, ranking.lists, ranking.users) == ({"ndcg_10": 0.5}, {"overlap": 0.75}, 7)
    assert [(row.baseline, row.difference, row.metric) for row in ranking.differences] == [
        ("high", 0.125, "ndcg_10"), ("low", 0.375, "ndcg_10")
    ]  # fmt: skip
    assert ranking.differences[1].high == 0.625
    assert 0.25 <= ranking.interval.low <= ranking.interval.high <= 0.75
    assert [part.ranking for part in quality.segments] == [{"ndcg_10": 0.5}, {"ndcg_10": 0.125}]
    assert quality.not_ranked is None
    # Of labels the AUC decides, of next items the ranking.
    assert derive.compared(CLICK_LABELS, quality) == ()
    split = detailed({**scores, "ranking": {**facts, "split": "time"}})
    assert [row.baseline for row in derive.compared(NEXT_ITEM, split)] == ["high", "low"]
    plain = {**scores, "seeds": {"1": sampled(None, rows_digest="a", ranking=ranked(0.25))}}
    assert detailed(plain).ranking.lists is None  # type: ignore[union-attr]
    for name, value in (("ranking", None), ("seeds", {"3": sampled(None, rows_digest="a")})):
        unranked = detailed({**scores, name: value})
        assert (unranked.ranking, unranked.not_ranked) == (None, "why")


@pytest.mark.parametrize(
    ("rows", "auc", "count"),
    [(1000, 0.7, 0), (999, 0.7, 1), (750, 0.7, 1), (1500, 0.7, 0), (1000, 0.99, 0), (1000, 0.991, 1),
     (1000, 0.5, 1), (999, 0.5, 2), (1000, 1.0, 1), (1000, 0.25, 0)],
)  # fmt: skip
def test_reasons_to_doubt_are_counted(rows: int, auc: float, count: int) -> None:
    scores = msgspec.convert({**SCORES, "rows": rows}, SavedScores)
    assert len(derive.warnings(scores, auc)) == count
    assert (derive.few_rows(rows) is None) is (rows >= 1000)


@pytest.mark.parametrize(
    ("target", "standing", "met"),
    [
        ({}, "below", True),
        ({"beat": "rule"}, "above", True),
        ({"beat": "rule"}, "level", False),
        ({"beat": "rule"}, "below", False),
        ({"beat": "rule"}, None, True),
        ({"beat": "equal"}, None, False),
        ({"beat": "best"}, "above", False),
        ({"beat": "strong"}, "above", False),
        ({"accuracy": 0.7, "auc": 0.8}, None, True),
        ({"accuracy": 0.7001}, None, False),
        ({"auc": 0.8001}, None, False),
        ({"beat": "rule", "auc": 0.9}, "above", False),
    ],
)
def test_a_target_is_met_if_every_bound_is(target: dict[str, Any], standing: str | None, met: bool) -> None:
    baselines = {"rule": {"auc": 0.75}, "equal": {"auc": 0.8}, "strong": {"auc": 0.85}, "planted": {"auc": 0.99}}
    rows = [
        Difference(low=0, high=0, metric="auc", baseline=name, difference=0, below_zero=0, seeds=1, standing=place)
        for name, place in (("other", "level"), ("rule", standing))
        if place
    ]
    wanted = Target(**{"beat": None, "accuracy": None, "auc": None, **target})
    assert derive.meets(CLICK_LABELS, {"accuracy": 0.7, "auc": 0.8}, baselines, wanted, rows) is met
    # A bound of a metric that the workload does not have is none.
    assert derive.meets(NEXT_ITEM, {"ndcg_10": 0.2}, {}, Target(beat=None, accuracy=0.9, auc=0.9)) is True


def test_a_bound_is_said_on_the_side_that_is_better() -> None:
    assert [derive.limit_text(metric) for metric in ("auc", "log_loss")] == ["at least", "at most"]
    assert [derive.better_side(metric) for metric in ("ndcg_10", "log_loss")] == ["above", "below"]


@pytest.mark.parametrize(
    ("negative", "met"), [(None, True), (0, True), (1, True), (4, False), (99, False), (100, False)]
)
def test_the_interval_of_the_difference_decides_whether_a_baseline_is_beaten(negative: int | None, met: bool) -> None:
    """Of 100 replicates so many are negative: the interval leaves out 2.5 % on either side."""
    trials = [
        TrialResult(seed=seed, metrics={"auc": auc}, best=Evaluation(step=1, epoch=1, metrics={}))
        for seed, auc in ((42, 0.75), (43, 0.875), (44, 1.0))
    ]
    rule = sampled(0.5, *[0.5] * 100)
    replicates = [0.25] * (negative or 0) + [0.75] * (100 - (negative or 0))
    scores = {
        **SCORES, "baselines": {"rule": rule}, "segments": {},
        "seeds": {"42": sampled(0.875, *replicates, rows_digest="a")},
    }  # fmt: skip
    evidence: Any = SimpleNamespace(
        task=CLICK_LABELS,
        trials=lambda: trials,
        baselines={"rule": {"auc": 0.5}},
        has=lambda name: name == "scores.json" and negative is not None,
        file=lambda name, kind: msgspec.convert(scores, kind),
    )
    quality = derive.quality_of(evidence, Target(beat="rule", accuracy=None, auc=None))
    assert (quality.met, quality.metrics, quality.seeds) == (met, {"auc": 0.875}, trials)
    assert quality.spread == {"auc": 0.125}
    assert len(quality.differences) == (negative is not None)
    del trials[1:]
    assert derive.quality_of(evidence, NO_TARGET).spread == {}
