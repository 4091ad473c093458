"""Kernels skip ids outside their table and leave one in the device's flag."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from recperf.errors import ArgumentError
from recperf.ops.arguments import raise_if_any

pytestmark = pytest.mark.usefixtures("triton")
CPU = torch.device("cpu")
OFFSETS, STARTS, GRADIENT = torch.tensor([0, 2, 4]), torch.tensor([0, 4]), torch.ones(2, 3)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    raise_if_any(CPU)


def kernels(op: str) -> ModuleType:
    return importlib.import_module(f"recperf.ops.{op}.triton")


def fails(value: int, last: int) -> None:
    with pytest.raises(ArgumentError, match=f"an id of a batch on cpu is {value}; allowed: 0 to {last}"):
        raise_if_any(CPU)


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize(("ids", "starts", "last"), [
    ([1, 10, 2, 3], None, 9), ([1, 2, -5, 3], None, 9),
    ([1, 4, 2, 3], STARTS, 3), ([1, 2, 6, 3], STARTS, 5), ([1, 2, 1 << 40, 3], STARTS, 5),
])  # fmt: skip
def test_bags(
    ids: list[int], starts: Tensor | None, last: int, side_by_side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bag, table = kernels("bag"), torch.ones(10, 3)
    monkeypatch.setattr(bag, "SHORT", 1000 if side_by_side else 0)
    strange = next(i for i in ids if not 0 <= i <= 3)
    sums = bag.bag_sum(table, torch.tensor(ids), OFFSETS, starts)
    fails(strange, last)
    assert sorted(sums[:, 0].tolist()) == [1.0, 2.0]
    grouped = bag.Grouped(torch.tensor(ids), OFFSETS, 10, starts)
    fails(strange, last)
    bag.update(table, None, grouped, GRADIENT, rule="sgd", rate=1.0, eps=0.0, decay=0.0, scale=1.0)
    assert int((table == 0).all(1).sum()) == 3


@pytest.mark.parametrize("strange", [-1, 7, 1 << 40])
def test_lookups(strange: int) -> None:
    lookup, table, state = kernels("lookup"), torch.ones(7, 3), torch.zeros(7)
    rows = torch.tensor([0, strange, 6])
    assert lookup.gather(table, rows)[:, 0].tolist() == [1.0, 0.0, 1.0]
    fails(strange, 6)
    lookup.update_rows_(table, state, rows, torch.ones(3, 3), rule="rowwise-adagrad", rate=0.5, eps=1e-8)
    fails(strange, 6)
    assert state.tolist() == [1.0, 0, 0, 0, 0, 0, 1.0]
