"""What experiments expect, when they agree, and which batches they may change."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional

import recperf
from recperf.measure import experiments
from recperf.measure.clocks import ClockReading
from recperf.measure.experiments import HALF, TWICE, _could_be_offsets, _doubled, _expected, confirm, hot_ids, judged
from recperf.measure.limit_kinds import LIMITS
from recperf.measure.records import Attribution, DividedOperator, Observed, Percentiles


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
    row = judged("one", measured, spread, *_expected(own(**shares), factors))
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
    for batch in (
        (ids, offsets),
        (rows, offsets),
        (rows, ids[:3]),
        (rows, 4),
        (rows, object()),
        (rows, torch.tensor(1)),
        (),
    ):
        assert _doubled(batch) is None
    assert _doubled(ids) is None, "the step may hold the offsets of these ids"
    for batch in (torch.rand(3), ids.view(2, 2)):
        assert torch.equal(_doubled(batch), torch.cat([batch, batch]))


def step_of(**shares: float) -> tuple[Attribution, Observed]:
    attribution = Attribution({**dict.fromkeys(LIMITS, 0.0), **shares}, 0.0, [])
    waits = {limit: 4.0 * share for limit, share in shares.items()}
    return attribution, Observed("cpu", 1, Percentiles(3.9, 4.0, 4.1), waits, [])


@pytest.mark.parametrize(("seconds", "outcome"), [(0.0011, "agrees"), (0.02, "disagrees")])
def test_a_step_that_waits_for_input_is_replayed_and_nothing_else(
    seconds: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, lambda batch: seconds)
    (row,) = confirm(clock.step, torch.ones(2, 2), True, *step_of(input=0.7, blocked=0.3))
    assert (row.name, row.outcome) == ("one batch from memory again and again", outcome)


def test_an_experiment_that_takes_too_long_or_fails_is_not_run() -> None:
    attribution, observed = step_of(blocked=1.0)

    def step(batch: torch.Tensor) -> None:
        if len(batch) > 2:
            raise ValueError("too long")

    outcomes = {row.name: row for row in confirm(step, torch.ones(2, 2), True, attribution, observed)}
    assert outcomes["twice the batch"].measured == "not possible: ValueError: too long"
    rows = confirm(step, torch.ones(2, 2), True, attribution, observed, 0.0)
    assert {row.outcome for row in rows} == {"not run"}


class Clock:
    """Stands for `_time`: a run of the step takes as long as the step says, and nothing is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Any], float | list[float]]) -> None:
        self.counts: list[int] = []
        self.seconds, self.spent = seconds, 0.0
        monkeypatch.setattr(experiments, "seconds_of", self)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        # What other tests compiled is not part of this step.
        monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)

    def step(self, batch: Any = None) -> None:
        seconds = self.seconds(batch)
        self.spent = seconds.pop(0) if isinstance(seconds, list) else seconds

    def __call__(self, run: Callable[[], object], count: int) -> float:
        run()
        self.counts.append(count)
        return self.spent


class Batch(list[int]):
    """Knows how to be cut."""

    def slice(self, begin: int, end: int) -> Batch:
        return Batch(self[begin:end])


def rows_of(**random_ms: float) -> list[DividedOperator]:
    return [
        DividedOperator(
            name=f"aten::{name}", part=None, kind="index", calls=1, python_calls=1, ms=ms, limits={"latency": ms},
            random_ms=ms, note="",
        )
        for name, ms in random_ms.items()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shares", "twice", "half"),
    [
        ({"launch": 1.0}, "1.00 to 1.00", "1.00 to 1.00"),
        ({"sync": 1.0}, "1.00 to 1.00", "1.00 to 1.00"),
        ({"dispatch": 1.0}, "1.00 to 1.25", "0.80 to 1.00"),
        ({"blocked": 1.0}, "1.00 to 2.00", "0.50 to 1.00"),
        ({"python": 1.0}, "1.00 to 2.00", "0.50 to 1.00"),
        ({"communication": 1.0}, "1.00 to 2.00", "0.50 to 1.00"),
        ({"transfer": 1.0}, "1.50 to 2.50", "0.40 to 0.67"),
        ({"compute": 1.0}, "1.50 to 2.50", "0.40 to 0.67"),
        ({"bandwidth": 1.0}, "1.50 to 2.50", "0.40 to 0.67"),
        ({"latency": 1.0}, "1.50 to 2.50", "0.40 to 0.67"),
        ({"cache": 1.0}, "1.50 to 3.50", "0.29 to 0.67"),
        ({"operator": 1.0}, "1.00 to 3.00", "0.33 to 1.00"),
        ({"compute": 0.6, "launch": 0.4}, "1.30 to 1.90", "0.64 to 0.80"),
        # Shares of the step without its wait for input.
        ({"compute": 0.54, "launch": 0.36, "input": 0.1}, "1.30 to 1.90", "0.64 to 0.80"),
    ],
)
def test_what_another_batch_does_to_each_limit(
    shares: dict[str, float], twice: str, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, lambda batch: 1.0)
    for batch, name, expected in (
        (torch.ones(2, 2), "twice the batch", twice),
        (Batch([1, 2, 3, 4]), "half the batch", half),
    ):
        rows = {row.name: row for row in confirm(clock.step, batch, True, *step_of(**shares))}
        assert rows[name].expected == f"{expected} times the step"
    assert [row.name for row in confirm(clock.step, Batch([1]), True, *step_of(compute=1.0))] == []
    assert confirm(clock.step, None, False, *step_of(compute=1.0)) == []


@pytest.mark.parametrize(
    ("shares", "measured", "outcome"),
    [
        ({"compute": 1.0}, 1.49, "disagrees"),
        ({"compute": 1.0}, 1.5, "agrees"),
        ({"compute": 1.0}, 2.5, "agrees"),
        ({"compute": 1.0}, 2.51, "disagrees"),
        # 1.30 to 2.00 with these shares, 1.20 to 1.75 with those of the two exchanged.
        ({"compute": 0.6, "dispatch": 0.4}, 1.3, "inconclusive"),
        ({"compute": 0.6, "dispatch": 0.4}, 1.75, "inconclusive"),
        ({"compute": 0.6, "dispatch": 0.4}, 1.76, "agrees"),
        ({"compute": 0.6, "dispatch": 0.4}, 2.01, "disagrees"),
        # A runner-up of a tenth counts: 1.05 to 1.75 against 1.45 to 2.95; a smaller one does not: then the limit that
        # would be most different, a cache.
        ({"operator": 0.9, "cache": 0.1}, 1.4, "agrees"),
        ({"operator": 0.9, "cache": 0.1}, 1.5, "inconclusive"),
        ({"launch": 0.91, "compute": 0.09}, 1.1, "agrees"),
    ],
)
def test_what_is_measured_decides(
    shares: dict[str, float], measured: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, lambda batch: measured if len(batch) == 4 else 1.0)
    (row,) = confirm(clock.step, torch.ones(2, 2), True, *step_of(**shares))
    assert (row.outcome, row.measured) == (outcome, f"{measured:.2f} times")


@pytest.mark.parametrize(
    ("measured", "spread", "rival", "expected", "outcome"),
    [
        (2.5, 0.5, (4.0, 4.0), "0.50 to 2.50", "agrees"),
        (2.51, 0.5, (4.0, 4.0), "0.50 to 2.50", "disagrees"),
        (0.5, 0.5, (4.0, 4.0), "0.50 to 2.50", "agrees"),
        (2.5, 2.5, (4.0, 4.0), "at most 4.50", "inconclusive"),
        # The spread widens the other range too, and may be as large as the effect.
        (2.0, 0.5, (2.5, 3.5), "0.50 to 2.50", "inconclusive"),
        (1.99, 0.5, (2.5, 3.5), "0.50 to 2.50", "agrees"),
        (1.0, 1.0, (3.0, 4.0), "at most 3.00", "agrees"),
        (0.9, 1.0, (2.0, 3.0), "at most 3.00", "agrees"),
        (0.9, 1.1, (2.0, 3.0), "at most 3.10", "inconclusive"),
        # Below the widened other range too, but repeats vary by more than the middles of both differ.
        (0.8, 1.1, (2.0, 3.0), "at most 3.10", "inconclusive"),
        # Two digits are printed, and compared.
        (2.504, 0.5, (4.0, 4.0), "0.50 to 2.50", "agrees"),
        (2.5, 0.496, (4.0, 4.0), "0.50 to 2.50", "agrees"),
        (0.5, 0.496, (4.0, 4.0), "0.50 to 2.50", "agrees"),
        (2.0, 0.5, (2.504, 3.5), "0.50 to 2.50", "inconclusive"),
        (1.5, 0.5, (0.5, 0.996), "0.50 to 2.50", "inconclusive"),
    ],
)
def test_the_spread_of_repeats(
    measured: float, spread: float, rival: tuple[float, float], expected: str, outcome: str
) -> None:
    row = judged("one", measured, spread, (1.0, 2.0), rival)
    assert (row.expected, row.outcome) == (f"{expected} times the step", outcome)


def test_turns_and_their_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 4 ms is repeated for 50 ms in each turn, after a warm-up; of four ratios p20, p50 and p80 count."""
    times = iter([9.0, *(time for ratio in (1.6, 2.0, 2.2, 1.8) for time in (1.0, ratio))])
    clock = Clock(monkeypatch, lambda batch: next(times))
    (row,) = confirm(clock.step, torch.ones(2, 2), True, *step_of(compute=1.0))
    assert clock.counts == [2, *[12] * 8]
    # p20 = 1.72 and p80 = 2.08 widen 1.50 to 2.50 by 0.36.
    assert (row.measured, row.expected) == ("1.90 times", "1.14 to 2.86 times the step")
    for step_ms, count in ((0.1, 100), (200.0, 1)):
        clock = Clock(monkeypatch, lambda batch: 1.0)
        attribution, observed = step_of(compute=1.0)
        observed.step_ms = Percentiles(step_ms, step_ms, step_ms)
        confirm(clock.step, torch.ones(2, 2), True, attribution, observed)
        assert clock.counts[1] == count


@pytest.mark.parametrize(
    ("step_ms", "seconds", "ran"),
    [
        (500.0, None, True),
        (501.0, None, False),
        (4.0, 0.08, True),
        (4.0, 0.079, False),
        (4000.0, 100.0, True),
        (0.0, 2.1e-5, True),
        (0.0, 1.9e-5, False),
    ],
)
def test_a_time_limit(step_ms: float, seconds: float | None, ran: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four turns of both, each up to 2.5 times as long as the step."""
    clock = Clock(monkeypatch, lambda batch: 1.0)
    attribution, observed = step_of(compute=1.0)
    observed.step_ms = Percentiles(step_ms, step_ms, step_ms)
    (row,) = confirm(clock.step, torch.ones(2, 2), True, attribution, observed, seconds)
    assert (row.outcome != "not run") is ran
    assert ran or row.measured == f"it would take {step_ms / 50:.0f} s"


def test_the_wait_for_input_takes_no_time_of_an_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 800 ms the step itself takes 480, of which 20 fit into 10 s."""
    clock = Clock(monkeypatch, lambda batch: 1.0)
    attribution, observed = step_of(compute=0.6, input=0.4)
    observed.step_ms = Percentiles(800.0, 800.0, 800.0)
    row = confirm(clock.step, torch.ones(2, 2), True, attribution, observed)[-1]
    assert (row.name, row.measured) == ("twice the batch", "1.00 times")


@pytest.mark.parametrize(("seconds", "second"), [(6, "it would take 5 s"), (5, "1.00 times")])
def test_experiments_share_their_time(seconds: int, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s the first takes 6, which leaves too few for the 5 s of the second, or 5."""
    clock = Clock(monkeypatch, lambda batch: 1.0)
    now = itertools.count(1000, seconds)
    monkeypatch.setattr(experiments, "perf_counter", lambda: float(next(now)))
    attribution, observed = step_of(latency=1.0)
    attribution.random, attribution.operators = 1.0, rows_of(embedding=4.0)
    observed.step_ms = Percentiles(250.0, 250.0, 250.0)
    measured = [row.measured for row in confirm(clock.step, torch.ones(2, 2), True, attribution, observed)]
    assert measured == ["1.00 times", second]


@pytest.mark.parametrize(("step_ms", "count"), [(4.0, 50), (30.0, 10), (200.0, 3)])
def test_the_replay_of_a_batch(step_ms: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait of 70 % a step takes at most 30 %, and half of both spreads, which are a tenth of the step."""
    clock = Clock(monkeypatch, lambda batch: 0.3 * step_ms / 1e3)
    attribution, observed = step_of(input=0.7, compute=0.3)
    observed.step_ms = Percentiles(0.95 * step_ms, step_ms, 1.05 * step_ms)
    (row,) = confirm(clock.step, torch.ones(2, 2), True, attribution, observed)
    assert (row.outcome, row.measured, clock.counts) == ("agrees", "0.30 times", [1] * count)
    assert row.expected == "at most 0.35 times the step: waiting for input (70%) vanishes"
    late = Clock(monkeypatch, lambda batch: 0.36 * step_ms / 1e3)
    assert confirm(late.step, torch.ones(2, 2), True, attribution, observed)[0].outcome == "disagrees"


def test_which_steps_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(has_batch: bool, **shares: float) -> list[str]:
        clock = Clock(monkeypatch, lambda batch: 1.0)
        return [row.name[:5] for row in confirm(clock.step, torch.ones(2, 2), has_batch, *step_of(**shares))]

    assert names(True, input=0.1, compute=0.9) == ["one b", "twice"]
    assert names(True, input=0.09, compute=0.91) == ["twice"]
    assert names(True, input=0.5, compute=0.5) == ["one b"]
    assert names(False, input=0.9, compute=0.1) == []


def test_the_work_of_an_optimizer_does_not_follow_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 of 4 ms of bandwidth are those of an optimizer, and 1 ms of calls, which stay as they are."""
    for part, expected in (
        ("optimizer Adam.step", "1.12 to 1.44"), ("update", "1.12 to 1.44"), ("forward", "1.38 to 2.19"),
        (None, "1.38 to 2.19"),
    ):  # fmt: skip
        attribution, observed = step_of(bandwidth=0.75, dispatch=0.25)
        attribution.operators = rows_of(mul=2.0)
        attribution.operators[0] = replace(
            attribution.operators[0], part=part, limits={"bandwidth": 2.0, "dispatch": 1.0}
        )
        clock = Clock(monkeypatch, lambda batch: 1.0)
        (row,) = confirm(clock.step, torch.ones(2, 2), True, attribution, observed)
        assert row.expected == f"{expected} times the step"
    # Of 4 ms without the wait for input 2 ms are copies and 2 ms an optimizer's, which has no copies.
    attribution, observed = step_of(transfer=0.4, bandwidth=0.4, input=0.2)
    observed.waits = {"transfer": 2.0, "input": 1.0}
    attribution.operators = observed.operators = [
        replace(row, part="update", limits={"bandwidth": 2.0}) for row in rows_of(mul=2.0)
    ]
    row = confirm(clock.step, torch.ones(2, 2), True, attribution, observed)[-1]
    assert (row.name, row.expected) == ("twice the batch", "1.25 to 1.75 times the step")


@pytest.mark.parametrize("samples", [4, 5])
def test_half_a_batch_has_half_of_its_samples(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda batch: float(len(batch)))
    (row,) = confirm(clock.step, Batch(range(samples)), True, *step_of(compute=1.0))
    assert (row.name, row.measured) == ("half the batch", f"{2 / samples:.2f} times")


@pytest.mark.parametrize(
    ("shares", "random", "rows", "most"),
    [
        ({"latency": 1.0}, 0.5, {"embedding": 2.0}, "0.85"),
        # Half of the random rows are those of an operator whose ids cannot be replaced.
        ({"latency": 1.0}, 0.5, {"embedding": 2.0, "sort": 2.0}, "0.93"),
        ({"latency": 1.0}, 0.25, {"embedding": 4.0, "sort": 1.0}, "0.94"),
        ({"latency": 1.0}, 0.24, {"embedding": 4.0, "sort": 1.0}, None),
        ({"latency": 0.8, "input": 0.2}, 0.4, {"embedding": 2.0}, "0.85"),
        ({"latency": 1.0}, 0.0, {}, None),
    ],
)
def test_random_rows_vanish_with_hot_ids(
    shares: dict[str, float], random: float, rows: dict[str, float], most: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, lambda batch: 1.0)
    attribution, observed = step_of(**shares)
    attribution.random, attribution.operators = random, rows_of(**rows)
    ran = confirm(clock.step, None, False, attribution, observed)
    assert [row.expected for row in ran] == ([f"at most {most} times the step"] if most else [])


@pytest.mark.parametrize(
    ("shares", "more", "most"),
    [
        ({"launch": 0.2, "python": 0.2, "compute": 0.6}, {}, "0.80"),
        ({"launch": 0.19, "python": 0.21, "compute": 0.6}, {}, None),
        ({"launch": 0.2, "python": 0.2, "compute": 0.6}, {"sync": 1.0}, None),
        ({"launch": 0.2, "python": 0.2, "compute": 0.6}, {"device": "cpu"}, None),
        ({"launch": 0.2, "python": 0.2, "compute": 0.6}, {"captured": False}, None),
    ],
)
def test_launches_vanish_in_a_graph(
    shares: dict[str, float], more: dict[str, Any], most: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, lambda batch: 1.0)
    monkeypatch.setattr(experiments, "captured_step", lambda plain: plain if more.get("captured", True) else None)
    attribution, observed = step_of(**shares)
    observed.device, observed.waits["sync"] = more.get("device", "H200"), more.get("sync", 0.0)
    ran = confirm(clock.step, None, False, attribution, observed)
    assert [row.expected for row in ran] == ([f"at most {most} times the step"] if most else [])


def test_half_the_threads_of_each_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    every = SimpleNamespace(product=lambda _: 8e10, stream=3e10, row_ns=lambda _: 10.0, cached=9e10)
    half = SimpleNamespace(product=lambda _: 4e10, stream=2e10, row_ns=lambda _: 40.0, cached=9e10)
    monkeypatch.setattr(experiments, "ceilings_of", lambda peaks, threads: every if threads >= 3 else half)
    # Twice, 1.5, 4 and 1 times as long at the ceilings; at most 1.2 times what perfectly divided work loses.
    factors = experiments._half_threads(None, 4)
    ranges = {
        "compute": (1.5, 2.2),
        "bandwidth": (1.25, 2.2),
        "latency": (2.5, 4.0),
        "cache": (1.0, 2.2),
        "operator": (1.0, 2.2),
    }
    assert {limit: factors[limit] for limit in ranges} == {limit: pytest.approx(one) for limit, one in ranges.items()}
    assert (factors["dispatch"], factors["python"], factors["launch"]) == ((0.75, 1.25), (1.0, 1.0), (1.0, 1.0))
    assert experiments._half_threads(None, 3)["compute"] == pytest.approx((1.5, 3.4))
    monkeypatch.setattr(experiments, "ceilings_of", lambda peaks, threads: every if threads >= 3 else None)
    assert experiments._half_threads(None, 4)["latency"] == pytest.approx((1.0, 2.2))


def test_half_the_threads_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    clock = Clock(monkeypatch, lambda batch: 1.0)
    monkeypatch.setattr("recperf.measure.peaks.cpu.using_threads", lambda count: used.append(count) or nullcontext())
    for threads, device, names in ((4, "cpu", ["half the threads"]), (1, "cpu", []), (4, "H200", [])):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        attribution, observed = step_of(compute=1.0)
        observed.device = device
        assert [row.name for row in confirm(clock.step, None, False, attribution, observed)] == names
    assert set(used) == {2}


def test_the_time_of_a_run_is_without_what_other_work_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 ms for two runs, in 2 of which other work had the core."""
    readings = iter([ClockReading(0, 0, 0, 0), ClockReading(8_000_000, 5, 2_000_000, 5)])
    monkeypatch.setattr(
        experiments, "ThreadClock", lambda: SimpleNamespace(now=lambda: next(readings), close=lambda: None)
    )
    ran: list[int] = []
    assert experiments.seconds_of(lambda: ran.append(1), 2) == pytest.approx(0.003)
    assert len(ran) == 2


HOT_100 = [*range(64), *range(36)]
IDS_100 = torch.arange(100, 200)


@pytest.mark.parametrize(
    ("lookup", "expected"),
    [
        (lambda table: table.select(1, 0)[IDS_100], HOT_100),
        (lambda table: functional.embedding(IDS_100, table)[:, 0], HOT_100),
        (lambda table: functional.embedding_bag(IDS_100[:, None], table, mode="sum")[:, 0], HOT_100),
        (lambda table: table.index_select(0, IDS_100.int())[:, 0], HOT_100),
        # A table of fewer rows: its third row is no hot one of the second dimension.
        (lambda table: table[5:7].index_select(1, torch.tensor([2, 2, 2, 2]))[0], [500, 501, 502, 500]),
        (lambda table: table[5:7].gather(1, torch.full((2, 4), 2))[1], [601, 602, 600, 601]),
        (lambda table: table.gather(0, IDS_100[:, None])[:, 0], HOT_100),
        # Elements are counted over both dimensions.
        (lambda table: table[1:3].take(torch.full((7,), 5)), [100, 101, 102, 200, 201, 202, 100]),
        (lambda table: table[IDS_100[:5], torch.full((5,), 2)], [0, 101, 202, 300, 401]),
        # Ids that are rows of integers, a mask, no ids, and additions to rows stay as they are.
        (lambda table: table.long()[IDS_100[:3], 0], [10000, 10100, 10200]),
        (lambda table: table[:, 0][table[:, 0] > 19_700], [19800, 19900]),
        (lambda table: functional.embedding(IDS_100[:0], table)[:, 0], []),
        (lambda table: torch.zeros(3).index_add(0, torch.tensor([2, 2]), table[1:3, 0]), [0, 0, 300]),
    ],
)
def test_lookups_get_ids_of_a_few_rows(lookup: Callable[[torch.Tensor], torch.Tensor], expected: list[int]) -> None:
    """Row r of the table has 100 r, 100 r + 1 and 100 r + 2."""
    table = (100.0 * torch.arange(200)[:, None] + torch.arange(3)).contiguous()
    if expected is HOT_100:
        expected = [100 * row for row in HOT_100]
    for _ in range(2):
        with experiments._HotIds():
            assert lookup(table).tolist() == expected


def test_each_table_gets_ids_of_its_own_rows() -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    with experiments._HotIds():
        looked_up = [torch.arange(float(rows)).index_select(0, ids).tolist() for rows in (3, 2, 3)]
    assert looked_up == [[0, 1, 2, 0], [0, 1, 0, 1], [0, 1, 2, 0]]


@pytest.mark.parametrize("sparse", [False, True])
def test_the_backward_pass_of_a_lookup_gets_the_ids_of_the_forward_pass(sparse: bool) -> None:
    table = torch.rand(200, 3, requires_grad=True)
    with experiments._HotIds():
        functional.embedding(IDS_100, table, sparse=sparse).sum().backward()
    assert table.grad is not None
    gradient = table.grad.to_dense()[:, 0]
    assert gradient.tolist() == [2.0] * 36 + [1.0] * 28 + [0.0] * 136


def test_hot_ids_of_a_pair_in_numbers() -> None:
    hot, cold = Percentiles(8.0, 10.0, 12.0), Percentiles(20.0, 40.0, 60.0)
    # Half of 12 / 20 - 8 / 60 widens the range.
    row = hot_ids(hot, cold, 0.5)
    assert (row.measured, row.expected) == (
        "0.25 times",
        "at most 1.08 times the step: random rows from memory (50%) vanish",
    )


@pytest.mark.parametrize(
    ("values", "offsets"),
    [([0], True), ([0, 2], True), ([0, 3], False), ([1, 2], False), ([0, 2, 1], False), ([0, 1, 1], True), ([], False)],
)
def test_ascending_positions_could_be_offsets(values: list[int], offsets: bool) -> None:
    assert _could_be_offsets(torch.tensor(values, dtype=torch.int64)) is offsets
    assert not _could_be_offsets(torch.tensor(values, dtype=torch.float32))
    assert not _could_be_offsets(torch.tensor(values, dtype=torch.bool))
    assert not _could_be_offsets(torch.tensor([values], dtype=torch.int64))


@pytest.mark.parametrize(
    ("options", "runs"),
    [({}, True), ({"light": True}, False), ({"confirm": False}, False), ({"confirm": True, "light": True}, False)],
)
def test_a_light_profile_runs_no_experiment(
    options: dict[str, bool], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []

    def run(
        step: Any, batch: Any, has_batch: bool, attribution: Any, observed: Any, seconds: Any, **_: Any
    ) -> list[Any]:
        asked.append(seconds)
        return []

    monkeypatch.setattr("recperf.execution.step_profile.run_experiments", run)
    monkeypatch.setattr("recperf.execution.step_profile.machine_peaks.require", lambda *_: None)
    weights = torch.ones(64, 64)
    recperf.profile(lambda batch: batch @ weights, [torch.ones(8, 64)] * 12, quiet=True, **options)
    assert asked == ([None] if runs else [])
