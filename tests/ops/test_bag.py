"""Every implementation of the bag against the reference, on odd shapes."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from recperf.ops.bag import native, reference
from recperf.ops.table_rules import RULES

FAST = ["native", "triton"]
ALL = ["reference", *FAST]
ROW_WISE = "rowwise-adagrad"


def body(name: str) -> ModuleType:
    return importlib.import_module(f"recperf.ops.bag.{name}")


LENGTHS = {
    "one each": [1] * 63,
    "empty rows": [0, 3, 0, 0, 5, 1, 0],
    "all empty": [0, 0, 0],
    "no bags": [],
    "one bag of one": [1],
    "long": [63, 1, 200, 0, 64],
    "many": [17] * 200,
}


def batch(lengths: list[int], rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(len(lengths) + dim)
    table = torch.randn(rows, dim, generator=draw)
    ids = torch.randint(0, rows, (sum(lengths),), generator=draw)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    gradient = torch.randn(len(lengths), dim, generator=draw)
    return table, ids, offsets, gradient


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize(("implementation", "side_by_side"), [("native", False), ("triton", True), ("triton", False)])
def test_sums_agree(
    implementation: str, side_by_side: bool, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "triton":
        monkeypatch.setattr(body("triton"), "SHORT", 1000 if side_by_side else 0)
        lengths = lengths[:20]
    # On a CPU every body adds in the order of the ids: a run may change its body for lookups and keep its bits.
    error = 0.0 if implementation == "native" else 1e-5
    shapes = ((1, 1), (5, 7), (5000, 64), (300, 100), (97, 300))
    for rows, dim in shapes[1::3] if implementation == "triton" else shapes:
        table, ids, offsets, _ = batch(lengths, rows, dim)
        sums = body(implementation).bag_sum(table, ids, offsets)
        assert sums.shape == (len(lengths), dim)
        if lengths:
            torch.testing.assert_close(sums, reference.bag_sum(table, ids, offsets), rtol=error, atol=error)


@pytest.mark.usefixtures("native_code")
def test_any_number_of_threads_gives_the_same_bits(threads: Any) -> None:
    table, ids, offsets, gradient = batch([9] * 3000, 700, 16)
    results = []
    for count in (1, 2, 3):
        threads(count)
        weights, state = table.clone(), torch.zeros(700)
        grouped = native.Grouped(ids, offsets, 700)
        native.update(
            weights, state, grouped, gradient, rule="rowwise-adagrad", rate=0.1, eps=1e-8, decay=0.0, scale=1.0
        )
        results.append((native.bag_sum(table, ids, offsets), weights, state))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def moments(rule: str, table: torch.Tensor) -> torch.Tensor | None:
    shape = RULES[rule].state_shape(*table.shape)
    return None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(1))


def updated(implementation: str, rule: str, given: tuple[torch.Tensor, ...], **more: Any) -> tuple[Any, ...]:
    """Weights and state after two updates, the second with a rate that is a tensor, and what else can be asked."""
    table, ids, offsets, gradient, *starts = given
    it, weights, state = body(implementation), table.clone(), moments(rule, table)
    grouped = it.Grouped(ids, offsets, table.shape[0], *starts)
    for count, rate in enumerate((0.1, torch.tensor([0.05])), 1):
        settings = {"rule": rule, "eps": 1e-8, "decay": 0.2, "scale": 0.5, "count": count} | more
        it.update(weights, state, grouped, gradient, rate=rate, **settings)
    return weights, state, it.squared_norm(grouped, gradient), grouped.unique


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [LENGTHS[name] for name in ("empty rows", "no bags", "long")])
@pytest.mark.parametrize("implementation", FAST)
def test_updates_of_every_rule_agree(implementation: str, lengths: list[int], rule: str) -> None:
    if implementation == "triton":
        # The interpreter takes its time.
        lengths = [min(length, 40) for length in lengths[:8]]
    given = batch(lengths, 37, 5)
    actual = updated(implementation, rule, given)
    for got, expected in zip(actual, updated("reference", rule, given)):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    unused = torch.ones(37, dtype=torch.bool)
    unused[given[1]] = False
    assert torch.equal(actual[0][unused], given[0][unused])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("implementation", FAST)
def test_one_row_that_everything_uses_is_summed_over_many_chunks(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the chunks that are joined at a time, alone and between other rows."""
    chunk = 4
    if implementation == "triton":
        monkeypatch.setattr(body("triton"), "chunk_size", lambda width: (chunk, 1))
    for ids in (torch.full((10 * chunk + 1,), 2), torch.tensor([0] * 3 + [1] * (9 * chunk) + [2] * 5 + [4])):
        offsets = torch.arange(0, ids.numel() + 1)
        gradient = torch.randn(ids.numel(), 2, generator=torch.Generator().manual_seed(0))
        given = (torch.ones(5, 2), ids, offsets, gradient)
        for got, expected in zip(updated(implementation, ROW_WISE, given), updated("reference", ROW_WISE, given)):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def stacked(dim: int = 6) -> tuple[torch.Tensor, ...]:
    """Three tables of 4, 1 and 9 rows, 5 bags each, some empty."""
    draw = torch.Generator().manual_seed(9)
    rows, lengths = (4, 1, 9), torch.tensor([[2, 0, 1, 3, 0], [0, 0, 0, 0, 0], [1, 1, 0, 4, 7]])
    ids = torch.cat([torch.randint(0, r, (int(n.sum()),), generator=draw) for r, n in zip(rows, lengths)])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    table, gradient = torch.randn(14, dim, generator=draw), torch.randn(15, dim, generator=draw)
    return table, ids, offsets, gradient, torch.tensor([0, 4, 5])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("implementation", ALL)
def test_updates_of_stacked_tables_are_those_of_rows(
    implementation: str, side_by_side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "triton":
        monkeypatch.setattr(body("triton"), "SHORT", 1000 if side_by_side else 0)
    table, ids, offsets, gradient, starts = stacked()
    rows = reference.stacked_rows(ids, offsets, starts)
    assert int(rows[6]) >= 5
    got = updated(implementation, ROW_WISE, (table, ids, offsets, gradient, starts))
    for mine, expected in zip(got, updated("reference", ROW_WISE, (table, rows, offsets, gradient))):
        torch.testing.assert_close(mine, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rule", [ROW_WISE, pytest.param("adam", marks=pytest.mark.long)])
@pytest.mark.parametrize("implementation", ALL)
def test_rows_in_the_slots_of_a_cache_get_the_bits_of_a_whole_table(implementation: str, rule: str) -> None:
    """Slots in another order than the rows, and one row in most chunks."""
    table, ids, offsets, gradient = batch([9] * 5, 37, 5)
    ids = torch.where(ids < 20, 7, ids)
    weights, state, norm, _ = updated(implementation, rule, (table, ids, offsets, gradient))
    rows, places = torch.unique(ids, return_inverse=True)
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(1))[: len(rows)]
    it, cache, moved_state = body(implementation), torch.zeros(50, 5), moments(rule, table)
    cache[slots] = table[rows]
    if moved_state is not None:
        whole, moved_state = moved_state, torch.zeros(50, *moved_state.shape[1:])
        moved_state[slots] = whole[rows]
    assert torch.equal(it.bag_sum(cache, slots[places], offsets), it.bag_sum(table, ids, offsets))
    grouped = it.Grouped(places, offsets, len(rows)).moved(slots, len(cache))
    for count, rate in enumerate((0.1, torch.tensor([0.05])), 1):
        more = {"rule": rule, "eps": 1e-8, "decay": 0.2, "scale": 0.5, "count": count}
        it.update(cache, moved_state, grouped, gradient, rate=rate, **more)
    assert torch.equal(cache[slots], weights[rows])
    assert state is None or (moved_state is not None and torch.equal(moved_state[slots], state[rows]))
    assert it.squared_norm(grouped, gradient) == norm
