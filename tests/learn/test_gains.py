"""Gains with their intervals: against known values of Student's distribution, and against simulated seeds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from recperf.learn.curve import doubled
from recperf.learn.diagnosis import Tried
from recperf.learn.gains import Gain, Scored, cumulative, gain, holm, pooled, quantile
from recperf.learn.records import QualityLimit
from recperf.learn.verdict import Outcome, verdict


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042), (1000, 1.962)])
def test_quantiles_are_those_of_tables(freedom: float, value: float) -> None:
    assert quantile(0.975, freedom) == pytest.approx(value, abs=0.001)
    assert cumulative(value, freedom) == pytest.approx(0.975, abs=1e-4)


def test_the_variance_of_seeds_is_pooled() -> None:
    assert pooled([[1.0, 3.0], [5.0], [2.0, 2.0, 5.0]]) == (pytest.approx((2.0 + 6.0) / 3), 3)


def test_an_interval_holds_the_true_gain_as_often_as_it_says() -> None:
    draw, held = random.Random(4), 0
    for _ in range(80):
        scored = []
        for true in (0.80, 0.83):
            values = {seed: true + draw.gauss(0, 0.01) for seed in range(3)}
            # As of so many users that only seeds differ.
            scored.append(Scored(values, {seed: [value] * 3 for seed, value in values.items()}, values))
        old, new = scored
        found = gain(new, old, pooled(one.values.values() for one in scored))
        held += found.low <= 0.03 <= found.high
    assert held / 80 >= 0.88


def test_users_widen_the_interval_and_one_seed_tells_nothing() -> None:
    old = Scored({0: 0.5, 1: 0.51}, {0: [0.4, 0.5, 0.6], 1: [0.41, 0.51, 0.61]}, {})
    same_users = Scored({0: 0.6, 1: 0.61}, {0: [0.5, 0.6, 0.7], 1: [0.51, 0.61, 0.71]}, {})
    others = Scored({0: 0.6, 1: 0.61}, {0: [0.7, 0.6, 0.5], 1: [0.71, 0.61, 0.51]}, {})
    seeds = pooled([old.values.values(), others.values.values()])
    paired, unpaired = gain(same_users, old, seeds), gain(others, old, seeds)
    assert paired.value == unpaired.value == pytest.approx(0.1)
    assert paired.certain
    assert not unpaired.certain
    assert not gain(same_users, old, (0.0, 0)).certain


def test_holm_asks_for_more_where_more_was_tried() -> None:
    assert holm([0.04]) == [True]
    assert holm([0.04, 0.5]) == [False, False]
    assert holm([0.001, 0.03, 0.02]) == [True, True, True]
    assert holm([0.001, 0.03, 0.03]) == [True, False, False]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_gain_of_twice_the_rows_lies_in_its_interval(power: float) -> None:
    draw, held = random.Random(5), 0
    true = 0.1 * (1.0 - 0.5**power) if power else 0.0
    for _ in range(40):
        parts = []
        for share in (0.25, 0.5, 1.0):
            value = 0.8 - 0.1 * share**-power
            values = {seed: value + draw.gauss(0, 0.004) for seed in range(3)}
            parts.append(Scored(values, {seed: [one] * 3 for seed, one in values.items()}, values))
        found = doubled(parts, pooled(one.values.values() for one in parts))
        held += found.low <= true <= found.high
    assert held >= 34


TRIED: dict[str, Any] = {
    "name": "ten times the rate",
    "change": "--train.learning-rate 0.1",
    "fields": {},
    "screened": False,
    "on_top": (),
}


def test_counting_beside_a_model_that_gives_all_users_one_list_does_not_explain_it() -> None:
    gain = Gain(value=0.05, low=0.03, high=0.07, chance=0.001, seeds=3)
    counting = Tried(limit="complement", chosen=0.05, gain=gain, kept=True, confirmed=True, **TRIED)
    found = verdict(
        Outcome(
            free=QualityLimit(limit="popularity", confidence="low", because=["two users share 99% of their lists"]),
            tried=[counting], left_out=[], below="", noise=0.005, curve=None, sums=[], whole=gain, fresh=gain,
            enough_seeds=True,
        )
    )  # fmt: skip
    assert (found.limit, found.second, found.confidence) == ("popularity", "complement", "low")
    assert "gains +0.0500" in found.because[-1]


@pytest.mark.parametrize(("other", "confidence"), [(0.01, "high"), (0.07, "low")])
def test_where_another_limit_gains_alike_the_confidence_is_low(other: float, confidence: str) -> None:
    gains = [Gain(value=value, low=value - 0.02, high=value + 0.02, chance=1e-4, seeds=3) for value in (0.08, other)]
    wide = Tried(limit="capacity", chosen=other, gain=gains[1], **{**TRIED, "name": "twice the width"})
    faster = Tried(limit="rate", chosen=0.08, gain=gains[0], kept=True, confirmed=True, **TRIED)
    found = verdict(
        Outcome(
            free=None, tried=[wide, faster], left_out=[], below="", noise=0.005, curve=None, sums=[], whole=gains[0],
            fresh=gains[0], enough_seeds=True,
        )
    )  # fmt: skip
    assert (found.limit, found.confidence) == ("rate", confidence)
    assert ("twice the width alone gains +0.0700" in found.doubts) == (confidence == "low")


def test_what_a_score_loses_without_a_leaking_input_confirms_the_leak() -> None:
    lost = Gain(value=-0.3, low=-0.35, high=-0.25, chance=1e-6, seeds=1)
    without = Tried(limit="leak", chosen=-0.3, gain=lost, confirmed=True, **{**TRIED, "name": "without paid"})
    found = verdict(
        Outcome(
            free=QualityLimit(limit="leak", confidence="low", because=["paid alone reaches an AUC of 0.970"]),
            tried=[without], left_out=[], below="", noise=0.005, curve=None, sums=[], whole=lost, fresh=lost,
            enough_seeds=True,
        )
    )  # fmt: skip
    assert (found.limit, found.confidence) == ("leak", "medium")
    assert "without paid (--train.learning-rate 0.1) the score changes by -0.3000 (-0.3500 to -0.2500)" in found.because


@pytest.mark.parametrize(
    ("limit", "value", "named", "says"),
    [
        ("rate", 0.02, "rate", "ten times the rate (--train.learning-rate 0.1) gains +0.0200 (-0.0800 to +0.1200)"),
        ("rate", -0.02, "unclear", "steps are too small, but no change of the config gained"),
        ("steps", 0.02, "rate", "no change that would confirm it was tried"),
    ],
)
def test_a_limit_that_no_experiment_confirms_is_named_at_most_with_low_confidence(
    limit: str, value: float, named: str, says: str
) -> None:
    none = Gain(value=0.0, low=-0.1, high=0.1, chance=1.0, seeds=3)
    own = Gain(value=value, low=value - 0.1, high=value + 0.1, chance=0.7, seeds=1)
    found = verdict(
        Outcome(
            free=QualityLimit(limit="rate", confidence="low", because=["steps are too small"]),
            tried=[Tried(limit=limit, chosen=value, gain=own, **TRIED)],
            left_out=[], below="", noise=0.05, curve=None, sums=[], whole=none, fresh=none, enough_seeds=True,
        )
    )  # fmt: skip
    assert (found.limit, found.confidence) == (named, "low")
    assert says in found.because
