"""Unpooled lookup: every body against plain sums in float64, on odd shapes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from recperf.ops import lookup
from recperf.ops.lookup import expand, gather, segment_sum, unique, update_rows_
from recperf.ops.table_rules import RULES, TableRule

ALL = ["reference", "triton"]

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that go over many chunks, without thousands of gradients."""
    if importlib.util.find_spec("triton"):
        monkeypatch.setattr("recperf.ops.lookup.triton.CHUNK", 4)


COUNTS = {
    "one each": [1] * 9,
    "empty rows": [0, 3, 0, 0, 5, 1, 0],
    "all empty": [0, 0, 0],
    "one of all": [1],
    "at the edges of chunks": [4, 8, 0, 4, 1, 3],
    "one long": [2, 63, 1],
    "nothing but one": [70],
    "no rows": [],
}


def segments(counts: list[int], dim: int, kind: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(dim + len(counts))
    starts = torch.tensor([0, *counts]).cumsum(0)
    order = torch.randperm(sum(counts), generator=draw)
    return torch.randn(sum(counts), dim, generator=draw).to(kind), order, starts


@pytest.mark.parametrize("dim", [1, 40])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("impl", ALL)
@pytest.mark.usefixtures("short_chunks")
def test_gradients_that_meet_are_summed(impl: Any, counts: list[int], dim: int) -> None:
    grad, order, starts = segments(counts, dim)
    expected = [grad[order[a:b]].double().sum(0) for a, b in zip(starts.tolist(), starts.tolist()[1:])]
    actual = segment_sum(grad, order, starts, impl=impl)
    assert actual.shape == (len(counts), dim)
    if counts:
        torch.testing.assert_close(actual, torch.stack(expected).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ALL)
def test_rows_are_gathered(impl: Any) -> None:
    table = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([49, 0, 7, 7, 48])
    for of in (table, table[:, 3:20], table.t().contiguous().t(), table.bfloat16(), table.long()):
        assert torch.equal(gather(of, rows, impl=impl), of[rows])
        assert torch.equal(gather(of, rows.int(), impl=impl), of[rows])
    assert gather(table, rows[:0], impl=impl).shape == (0, 24)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 33])
@pytest.mark.parametrize("impl", ALL)
def test_updates_of_every_rule(impl: Any, dim: int, kind: torch.dtype, rule: TableRule) -> None:
    draw = torch.Generator().manual_seed(dim)
    shape = rule.state_shape(40, dim)
    table, state = torch.randn(40, dim, generator=draw), None if shape is None else torch.rand(shape, generator=draw)
    correct, seen = table.double(), None if state is None else state.double()
    more: Any = {"rule": rule.name, "eps": 1e-3, "impl": impl}
    for count, rate in enumerate((0.1, torch.full((1,), 0.05)), 1):
        rows = torch.randperm(40, generator=draw)[: 11 + count]
        grad = torch.randn(rows.numel(), dim, generator=draw).to(kind)
        update_rows_(table, state, rows, grad, rate=rate, count=torch.tensor(float(count)), **more)
        rule.apply_(correct, seen, rows, grad.double(), rate=float(rate), eps=1e-3, count=count)
    update_rows_(table, state, rows[:0], grad[:0], rate=0.1, **more)
    torch.testing.assert_close(table, correct.float(), rtol=1e-5, atol=1e-5)
    if state is not None and seen is not None:
        torch.testing.assert_close(state, seen.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.usefixtures("short_chunks")
def test_rows_go_out_to_many_places_and_their_gradients_come_back(impl: Any) -> None:
    draw = torch.Generator().manual_seed(2)
    ids = unique(torch.randint(0, 9, (63,), generator=draw))
    rows = torch.randn(ids.values_U.numel(), 6, generator=draw)
    weight = torch.randn(63, 6, generator=draw)
    actual = []
    for run in ("plain", impl, impl):
        leaf = (rows.double() if run == "plain" else rows.clone()).requires_grad_()
        out = leaf[ids.inverse_N] if run == "plain" else expand(leaf, *_way(ids), impl=impl)
        (out.square() * weight).sum().backward()
        actual.append((out.detach().float(), leaf.grad.float()))  # type: ignore[union-attr]
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(actual[1][1], actual[2][1])


def _way(ids: lookup.Unique) -> tuple[Tensor, Tensor, Tensor]:
    return ids.inverse_N, ids.order_N, ids.starts_U1


@pytest.mark.parametrize("count", [0, 1, 2, 63, 500])
def test_unique_takes_ids_apart(count: int) -> None:
    ids = torch.randint(-40, 1 << 50, (count,), generator=torch.Generator().manual_seed(count)) % 97 - 3
    actual = unique(ids)
    assert torch.equal(actual.values_U, torch.unique(ids))
    assert torch.equal(actual.values_U[actual.inverse_N], ids)
    edges = actual.starts_U1.tolist()
    assert len(edges) == actual.values_U.numel() + 1
    assert edges[-1] == count
    for value, a, b in zip(actual.values_U.tolist(), edges, edges[1:]):
        assert actual.order_N[a:b].tolist() == (ids == value).nonzero().squeeze(1).tolist()
