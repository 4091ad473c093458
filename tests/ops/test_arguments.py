"""The C bodies that other projects call refuse tensors they would misread and ids outside their table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recperf.errors import ArgumentError
from recperf.ops.bag import native as bag
from recperf.ops.bag import reference as bag_reference
from recperf.ops.hstu_attention import Mask
from recperf.ops.hstu_attention import native as attention
from recperf.ops.mlp import native as relu

pytestmark = pytest.mark.skipif(isinstance(relu.library(), str), reason=str(relu.library()))

TABLE, IDS, OFFSETS, STARTS = torch.zeros(10, 4), torch.tensor([0, 3, 9]), torch.tensor([0, 2, 3]), torch.tensor([0, 4])
GRADIENT, STATE = torch.zeros(2, 4), torch.zeros(10)


def update(table: Tensor = TABLE, state: Tensor = STATE, gradient: Tensor = GRADIENT) -> None:
    grouped = bag.Grouped(IDS, OFFSETS, 10)
    bag.update(table.clone(), state, grouped, gradient, rule="rowwise-adagrad", rate=0.1, eps=0.1, decay=0.0, scale=1.0)


def turned(rows: int, columns: int) -> Tensor:
    return torch.zeros(columns, rows).t()


BAG_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "table float64": (lambda: bag.bag_sum(TABLE.double(), IDS, OFFSETS), "table_RD is float64"),
    "table turned": (lambda: bag.bag_sum(turned(10, 4), IDS, OFFSETS), "table_RD is non-contiguous"),
    "ids int32": (lambda: bag.bag_sum(TABLE, IDS.int(), OFFSETS), "ids_V is int32"),
    "ids strided": (lambda: bag.bag_sum(TABLE, torch.zeros(6, dtype=torch.int64)[::2], OFFSETS), "ids_V is non-cont"),
    "offsets too long": (lambda: bag.bag_sum(TABLE, IDS, torch.tensor([0, 4])), "offsets_B1 .* rise from 0 to 3"),
    "offsets falling": (lambda: bag.bag_sum(TABLE, IDS, torch.tensor([0, 3, 2, 3])), "offsets_B1 .* rise from 0 to 3"),
    "features uneven": (lambda: bag.bag_sum(TABLE, IDS, torch.tensor([0, 1, 2, 3]), STARTS), "describes 3 bags"),
    "starts outside": (lambda: bag.bag_sum(TABLE, IDS, OFFSETS, torch.tensor([0, 11])), "starts_F is"),
    "sort int32": (lambda: bag.Grouped(IDS.int(), OFFSETS, 10), "ids_V is int32"),
    "hash no rows": (lambda: bag.hash_rows(IDS, 0, 0), "rows is 0"),
    "update float64": (lambda: update(TABLE.double()), "table_RD is float64"),
    "update another table": (lambda: update(torch.zeros(9, 4)), r"table_RD .* must be .* of shape \(10, 4\)"),
    "update gradient": (lambda: update(gradient=GRADIENT.double()), "gradient_BD is float64"),
    "update state": (lambda: update(state=torch.zeros(9)), r"state .* must be .* of shape \(10\)"),
}


@pytest.mark.parametrize("body", [bag, bag_reference], ids=["native", "reference"])
@pytest.mark.parametrize("unknown", [-1, 10, -(1 << 63), (1 << 63) - 1])
def test_an_id_outside_the_table(body: Any, unknown: int) -> None:
    ids = torch.tensor([0, unknown, 9])
    for call in (lambda: body.bag_sum(TABLE, ids, OFFSETS), lambda: body.Grouped(ids, OFFSETS, 10)):
        with pytest.raises(ArgumentError, match=rf"ids_V\[1\] is {unknown}; allowed: 0 to 9"):
            call()


@pytest.mark.parametrize("body", [bag, bag_reference], ids=["native", "reference"])
@pytest.mark.parametrize(("ids", "place", "last"), [([3, 4, 5], 1, 3), ([3, 3, 6], 2, 5), ([3, 3, -1], 2, 5)])
def test_an_id_outside_its_own_table_of_several(body: Any, ids: list[int], place: int, last: int) -> None:
    """Tables of 4 and 6 rows follow one another: id 4 of the first would be row 0 of the second."""
    for call in (body.bag_sum, lambda table, *more: body.Grouped(more[0], more[1], 10, more[2])):
        with pytest.raises(ArgumentError, match=rf"ids_V\[{place}\] is {ids[place]}; allowed: 0 to {last}"):
            call(TABLE, torch.tensor(ids), OFFSETS, STARTS)


def test_ids_of_many_threads_are_all_checked() -> None:
    ids = torch.zeros(9000, dtype=torch.int64)
    ids[8999] = 10
    with pytest.raises(ArgumentError, match=r"ids_V\[8999\] is 10"):
        bag.bag_sum(TABLE, ids, torch.arange(9001))


Q, K, V = torch.zeros(6, 2, 3), torch.zeros(6, 2, 3), torch.zeros(6, 2, 5)
EDGES, MASK = torch.tensor([0, 4, 6]), Mask(alpha=1.0, length=4.0, longest=4)


def attend(q: Tensor = Q, k: Tensor = K, v: Tensor = V, offsets: Tensor = EDGES) -> object:
    return attention.forward(q, k, v, offsets, MASK)


def attend_back(grad: Tensor = V, last: bool = False, offsets: Tensor = EDGES) -> object:
    if last:
        return attention.backward_last(grad, Q[:2], K, V, offsets, MASK)
    return attention.backward(grad, Q, K, V, offsets, MASK)


ATTENTION_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "k float64": (lambda: attend(k=K.double()), "k is float64"),
    "v int32": (lambda: attend(v=V.int()), "v is int32"),
    "q tokens": (lambda: attend(q=Q[1:]), r"q is float32 of shape \(5, 2, 3\)"),
    "k heads": (lambda: attend(k=K[:, :1]), r"q is .* must be .* shape \(6, 1, 3\)"),
    "offsets beyond": (lambda: attend(offsets=torch.tensor([0, 4, 7])), "offsets_B1 .* end at 6"),
    "offsets falling": (lambda: attend(offsets=torch.tensor([0, 5, 4, 6])), "offsets_B1 .* never decrease"),
    "grad float64": (lambda: attend_back(V.double()), "grad is float64"),
    "grad tokens": (lambda: attend_back(V[1:]), r"grad is .* shape \(5, 2, 5\)"),
    "last grad": (lambda: attend_back(V, last=True), r"grad is .* must be .* shape \(2, 2, 5\)"),
    "last of none": (lambda: attend_back(V[:2], True, torch.tensor([0, 6, 6])), "has an empty row"),
}


CALLS = BAG_CALLS | ATTENTION_CALLS


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_wrong_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
