"""After a profile everything that a step changes is what plain steps leave; batches are passed as the step asks."""

from __future__ import annotations

import builtins
import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harmless_cases import HOT, Case, cases, every_experiment, profiled_like_plain
from hypothesis import Phase, given, settings
from torch import nn

import recperf
from recperf.errors import UsageError
from recperf.measure import experiments, saved_state, schedule
from recperf.measure.experiments import HOT_ROWS, _HotIds
from recperf.measure.saved_state import SavedState

DRAWN = (Phase.explicit, Phase.generate)
"""A smaller example of a failure would take minutes to find."""


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Few steps, every experiment in one turn, and no measuring of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "PLAIN_SECONDS", 0.01)
        patch.setattr(experiments, "TURNS", 1)
        patch.setattr("recperf.execution.step_profile.machine_peaks.require", lambda threads, say: None)
        patch.setattr("recperf.execution.step_profile.run_experiments", every_experiment)
        yield


def require_harmless(case: Case) -> None:
    report = profiled_like_plain(case)
    ran = {row.name: row.measured for row in report.experiments}
    assert {HOT, "one batch from memory again and again"} <= ran.keys(), (ran, report.notes)
    assert not any(text.startswith("not possible") for text in ran.values()), ran


@settings(max_examples=4, phases=DRAWN)
@given(cases(4))
def test_a_profile_leaves_what_plain_steps_leave(case: Case) -> None:
    require_harmless(case)


@pytest.mark.long
@settings(max_examples=100, phases=DRAWN)
@given(cases())
def test_a_profile_of_many_tables_leaves_what_plain_steps_leave(case: Case) -> None:
    require_harmless(case)


def test_tables_of_every_size() -> None:
    """Ids of one shape are looked up in tables of different sizes: those of one are no ids of the other."""
    kinds = itertools.cycle(("embedding", "bag", "index"))
    rows = [3, 10_000, 5, 64, 65, 1000, 7, 100_000]
    require_harmless(Case(list(zip(kinds, rows)), True, "adam", 0.3, True, batches=4))


@pytest.mark.slow
def test_a_table_of_ten_million_rows() -> None:
    require_harmless(Case([("bag", 10_000_000), ("embedding", 3)], True, width=8))


def test_new_ids_are_rows_of_the_table_of_each_call() -> None:
    """Of tables in any order and of every kind of lookup, in both passes; a mask, and a table of ids, stay."""
    small, large, plain = nn.Embedding(3, 2), nn.Embedding(1000, 2, sparse=True), nn.Parameter(torch.rand(70, 2))
    bag, ids = nn.EmbeddingBag(5, 2, mode="max"), torch.full((100,), 2)
    numbers, mask = torch.arange(1000), torch.arange(70) == 69
    with _HotIds():
        result = [small(ids), large(ids + 900), plain[ids + 60], bag(ids, torch.tensor([0, 50]))]
        assert torch.equal(plain[mask], plain[69:])
        assert numbers[ids + 900].tolist() == [902] * 100
        torch.stack([one.sum() for one in result]).sum().backward()
    hot = torch.arange(100)
    assert torch.equal(result[0], small.weight[hot % 3])
    assert torch.equal(result[1], large.weight[hot % HOT_ROWS])
    assert torch.equal(result[2], plain[hot % HOT_ROWS])
    for weight, rows in ((small.weight, 3), (large.weight, HOT_ROWS), (plain, HOT_ROWS)):
        assert weight.grad is not None
        expected = torch.bincount(hot % rows, minlength=len(weight)).float()
        assert torch.equal(weight.grad.to_dense()[:, 0], expected)


def test_sums_by_id_in_a_forward_pass_keep_their_ids() -> None:
    """A mean over groups divides by their counts: none may become 0. What is stored must reach every row."""
    groups = torch.arange(100)
    with _HotIds():
        counts = torch.zeros(100).index_add_(0, groups, torch.ones(100))
        stored = torch.zeros(100).index_copy_(0, groups, torch.ones(100))
        put = torch.zeros(100).index_put_((groups,), torch.ones(100))
    assert counts.min() == stored.min() == put.min() == 1


class Counting(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.top, self.seen = nn.Linear(4, 1), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        self.seen.append(len(x))
        return self.top(x)


def test_counters_and_lists_of_a_step_are_put_back() -> None:
    model, number = Counting(), 0

    def step(x: torch.Tensor) -> None:
        nonlocal number
        number += 1
        model(x).sum().backward()

    Counting.calls = 0
    report = recperf.profile(step, [torch.rand(8, 4) for _ in range(3)], confirm=True, quiet=True)
    assert report.experiments
    assert [number, Counting.calls, len(model.seen) - 1] == [report.steps_trained] * 3


def test_where_something_cannot_be_put_back_no_experiment_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, weight, taken = itertools.count(), torch.ones(4), []

    def step(x: torch.Tensor) -> None:
        taken.append(next(numbers))
        weight.add_(x)

    report = recperf.profile(step, [torch.ones(4)], confirm=True, quiet=True)
    assert report.experiments == []
    assert report.steps_trained == len(taken) == weight[0] - 1
    assert any("`numbers`, an object of type itertools.count" in note for note in report.notes), report.notes
    monkeypatch.setattr(saved_state, "available_bytes", lambda: 20)
    assert "more than half of the free memory" in SavedState(lambda: weight).problem


def test_what_a_step_makes_for_the_first_time_is_gone_again() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    kept: dict[str, Any] = {}
    saved = SavedState(lambda: (model, optimizer, kept))
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    kept["loss"], model.extra = 1, torch.ones(2)
    model.weight.data = torch.zeros(5, 5)
    assert not saved.problem
    saved.restore()
    assert (kept, dict(optimizer.state), model.weight.grad) == ({}, {}, None)
    assert model.weight.shape == (1, 2)
    assert not hasattr(model, "extra")


def test_a_deep_copy_in_a_step_does_not_stall() -> None:
    """A storage has a million elements, none of which is a tensor: walking them took minutes."""
    model = nn.Embedding(250_000, 4)

    def step() -> None:
        copy.deepcopy(model.state_dict())

    began = time.process_time()
    for _ in range(20):
        step()
    plain_s = (time.process_time() - began) / 20
    began = time.process_time()
    report = recperf.profile(step, confirm=False, quiet=True)
    assert report.steps.counted
    assert time.process_time() - began < 5 + 20 * report.steps.seen * plain_s


def test_batches_are_passed_as_the_step_asks() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    passed: list[Any] = []
    steps: dict[str, tuple[Any, Any, Any]] = {
        "whole": (lambda batch: passed.append(batch), (x, y), (x, y)),
        "unpacked": (lambda x, y: passed.append((x, y)), [x, y], (x, y)),
        "by name": (lambda *, y, x: passed.append((x, y)), {"x": x, "y": y}, (x, y)),
        "a dict as one": (lambda batch: passed.append(batch["x"]), {"x": x}, x),
        "default": (lambda batch, scale=2: passed.append(batch), (x, y), (x, y)),
        "none": (lambda: passed.append(()), (x, y), ()),
    }
    for name, (step, batch, expected) in steps.items():
        passed.clear()
        recperf.profile(step, [batch], confirm=False, quiet=True)
        assert len(passed[0]) == len(expected), name
        assert all(map(torch.equal, passed[0], expected)), name
    refused: list[tuple[Any, Any]] = [(lambda x, y, z: 0, [(x, y)]), (lambda x, y: 0, [x]), (lambda x: 0, None)]
    for step, batches in refused:
        with pytest.raises(UsageError, match="parameters"):
            recperf.profile(step, batches, quiet=True)


def test_a_star_import_leaves_open_alone() -> None:
    names: dict[str, Any] = {}
    exec("from recperf import *", names)
    assert "profile" in names
    assert names.get("open", builtins.open) is builtins.open
    assert "open" in dir(recperf)
    assert recperf.open is recperf.OpenRun
