"""What experiments expect, when they agree, and which batches they may change."""

from __future__ import annotations

from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recperf.measure import experiments
from recperf.measure.attribution import LIMITS
from recperf.measure.experiments import HALF, TWICE, _could_be_offsets, _doubled, _expected, _judged, confirm, hot_ids
from recperf.measure.records import Attribution, Observed, Percentiles


def own(**shares: float) -> dict[str, float]:
    return {limit: shares.get(limit, 0.0) for limit in (*LIMITS, experiments.OPTIMIZER) if limit != "input"}


@pytest.mark.parametrize(
    ("shares", "factors", "measured", "spread", "outcome"),
    [
        ({"compute": 0.9, "dispatch": 0.1}, TWICE, 1.9, 0.02, "agrees"),
        ({"compute": 0.9, "dispatch": 0.1}, TWICE, 1.07, 0.02, "disagrees"),
        # The runner-up would behave in the same way.
        ({"compute": 0.8, "bandwidth": 0.2}, TWICE, 1.9, 0.02, "inconclusive"),
        # Repeats vary by more than the two limits differ.
        ({"compute": 0.9, "dispatch": 0.1}, TWICE, 1.9, 0.9, "inconclusive"),
        ({"dispatch": 1.0}, TWICE, 1.1, 0.02, "agrees"),
        ({"dispatch": 1.0}, TWICE, 2.0, 0.02, "disagrees"),
        ({"compute": 1.0}, HALF, 0.52, 0.02, "agrees"),
        ({"compute": 0.6, "dispatch": 0.4}, HALF, 1.07, 0.05, "disagrees"),
        # Work of an optimizer does not follow the batch, whatever limits it.
        ({"bandwidth": 0.1, "optimizer": 0.9}, TWICE, 1.1, 0.02, "agrees"),
    ],
)
def test_the_printed_range_decides(
    shares: dict[str, float], factors: Any, measured: float, spread: float, outcome: str
) -> None:
    row = _judged("one", measured, spread, *_expected(own(**shares), factors))
    assert row.outcome == outcome
    low, high = (float(word) for word in row.expected.split() if word[0].isdigit())
    assert (low <= measured <= high) is (outcome != "disagrees"), row


def test_half_the_threads_follow_the_measured_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of one core may multiply no faster than one: then the product need not get slower."""
    for one_thread, low in ((1e11, 1.0), (5e10, 1.5)):
        ceilings = {
            threads: SimpleNamespace(product=lambda _, rate=rate: rate, row_ns=lambda _: 9.0, stream=1e10, cached=5e10)
            for threads, rate in ((2, 1e11), (1, one_thread))
        }
        monkeypatch.setattr(experiments, "ceilings_of", lambda peaks, threads, known=ceilings: known[threads])
        assert experiments._half_threads({}, 2)["compute"] == (low, pytest.approx(2.2))


def test_hot_ids_of_a_pair() -> None:
    hot, cold = Percentiles(9.0, 10.0, 11.0), Percentiles(29.0, 30.0, 31.0)
    assert hot_ids(hot, cold, 0.8).outcome == "agrees"
    assert hot_ids(hot, hot, 0.8).outcome == "disagrees"
    noisy = Percentiles(2.0, 10.0, 40.0)
    assert hot_ids(hot, noisy, 0.8).outcome == "inconclusive"


def test_only_a_batch_that_stays_a_batch_is_doubled() -> None:
    rows, ids = torch.rand(4, 3), torch.tensor([5, 1, 7, 2])
    doubled = _doubled((rows, {"ids": ids, "name": "train", "none": None}))
    assert [len(doubled[0]), doubled[1]["ids"].tolist()] == [8, [5, 1, 7, 2] * 2]
    offsets = torch.tensor([0, 1, 3, 3])
    assert _could_be_offsets(offsets)
    assert not any(map(_could_be_offsets, (ids, rows, torch.tensor([0, 9]), torch.tensor([0, 1, 0]))))
    for batch in ((ids, offsets), (rows, ids[:3]), (rows, 4), (rows, object()), (rows, torch.tensor(1)), ()):
        assert _doubled(batch) is None
    assert _doubled(ids) is None, "the step may hold the offsets of these ids"


def step_of(**shares: float) -> tuple[Attribution, Observed]:
    attribution = Attribution({**dict.fromkeys(LIMITS, 0.0), **shares}, 0.0, [])
    waits = {limit: 4.0 * share for limit, share in shares.items()}
    return attribution, Observed("cpu", 1, Percentiles(3.9, 4.0, 4.1), waits, [])


def test_a_step_that_waits_for_input_is_replayed_and_nothing_else() -> None:
    rows = confirm(lambda batch: sleep(0.001), torch.ones(2, 2), True, *step_of(input=0.7, blocked=0.3))
    assert [row.name for row in rows] == ["one batch from memory again and again"]
    assert rows[0].outcome in ("agrees", "inconclusive")
    rows = confirm(lambda batch: sleep(0.02), torch.ones(2, 2), True, *step_of(input=0.7, blocked=0.3))
    assert rows[0].outcome == "disagrees"


def test_an_experiment_that_takes_too_long_or_fails_is_not_run() -> None:
    attribution, observed = step_of(blocked=1.0)

    def step(batch: torch.Tensor) -> None:
        if len(batch) > 2:
            raise ValueError("too long")

    outcomes = {row.name: row for row in confirm(step, torch.ones(2, 2), True, attribution, observed)}
    assert outcomes["twice the batch"].measured == "not possible: ValueError: too long"
    rows = confirm(step, torch.ones(2, 2), True, attribution, observed, 0.0)
    assert {row.outcome for row in rows} == {"not run"}
