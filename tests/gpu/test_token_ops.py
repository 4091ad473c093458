"""Lookup, jagged copies, position and time compiled for a GPU, against plain torch, on memory that holds NaN before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recperf.ops import assemble, lookup
from recperf.ops.assemble import ages_of
from recperf.ops.dropout import Dropout

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("poisoned"),
]


def draw(seed: int) -> dict[str, Any]:
    return {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(seed)}


def offsets(lengths_B: Tensor) -> Tensor:
    return torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0)])


def apart(got: Tensor, expected: Tensor) -> float:
    """Distance over the size of what is expected."""
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 33, 512, 600])
@pytest.mark.parametrize(("rows", "skew"), [(1, 1.0), (9, 1.0), (5000, 1.0), (5000, 6.0)])
def test_gradients_are_summed_by_row(rows: int, skew: float, dim: int, kind: torch.dtype, no_waiting: Any) -> None:
    of = draw(dim + rows)
    places = (torch.rand(40_000, **of) ** skew * rows).long()
    sorted_N, order_N = torch.sort(places, stable=True)
    starts = torch.searchsorted(sorted_N, torch.arange(rows + 1, device="cuda"))
    grad = torch.randn(40_000, dim, **of).to(kind)
    lookup.segment_sum(grad, order_N, starts, impl="triton")
    with no_waiting():
        actual = [lookup.segment_sum(grad, order_N, starts, impl="triton") for _ in range(2)]
    assert torch.equal(*actual)
    expected = torch.zeros(rows, dim, dtype=torch.float64, device="cuda").index_add_(0, places, grad.double())
    assert apart(actual[0], expected) < 1e-5


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 33, 512])
def test_rows_are_gathered_and_updated(dim: int, kind: torch.dtype) -> None:
    of = draw(dim)
    table, state = torch.randn(9000, dim, **of), torch.rand(9000, **of)
    rows = torch.randperm(9000, **of)[:4001]
    assert torch.equal(lookup.gather(table, rows, impl="triton"), table[rows])
    grad = torch.randn(4001, dim, **of).to(kind)
    tables, states = [table, table.double()], [state, state.double()]
    for some, seen, impl in zip(tables, states, ("triton", "reference")):
        for rate in (0.1, torch.full((1,), 0.05, device="cuda")):
            more: Any = {"rule": "rowwise-adagrad", "eps": 1e-3, "impl": impl}
            lookup.update_rows_(some, seen, rows, grad, rate=rate, **more)
    assert apart(*tables) < 1e-6
    assert apart(*states) < 1e-6


def test_a_table_of_more_than_two_billion_numbers() -> None:
    last = 2**31 // 512 + 10
    table = torch.zeros(last + 1, 512, device="cuda")
    rows = torch.tensor([last, 3, last - 5], device="cuda", dtype=torch.int32)
    state, grad = torch.zeros(last + 1, device="cuda"), torch.randn(3, 512, **draw(1))
    lookup.update_rows_(table, state, rows, grad, rule="rowwise-adagrad", rate=1.0, eps=0.0)
    torch.testing.assert_close(table[rows.long()], -grad / grad.square().mean(1, keepdim=True).sqrt())
    assert torch.equal(lookup.gather(table, rows), table[rows.long()])
    assert int(table.any(1).sum()) == 3
    # As many gradients as that: sums must find those at the end too.
    order = torch.tensor([last, 3, last - 5, last], device="cuda")
    actual = lookup.segment_sum(table, order, torch.tensor([0, 1, 4], device="cuda"))
    torch.testing.assert_close(actual, torch.stack([table[last], table[[3, last - 5, last]].sum(0)]))


@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "longest", "dim"), [(40, 4096, 512), (700, 63, 512), (3, 9, 24)])
@pytest.mark.parametrize("context", [0, 8])
def test_tokens_in_one_pass(
    context: int, rows: int, longest: int, dim: int, kind: torch.dtype, rate: float, no_waiting: Any
) -> None:
    of = draw(rows + dim)
    lengths = torch.randint(context, longest + 1, (rows,), **of)
    lengths[0], lengths[-1] = context, longest
    edges = offsets(lengths)
    tokens, positions = int(edges[-1]), int(edges[-1]) - rows * context
    ids = lookup.unique((torch.rand(positions, **of) ** 4 * 3000).long())
    times = torch.randint(0, 26_000_000, (tokens,), **of) // 5 * 5
    codes = (torch.rand(positions, **of) ** 3 * 9).long()
    way = ids.inverse_N, ids.order_N, ids.starts_U1, codes
    sizes: dict[str, Any] = {"actions": 9, "ages": 2049, "context": context, "longest": longest}
    parts = [torch.randn(*size, dim, **of).to(kind) for size in ((rows, context), ids.values_U.shape, (9,))]
    parts += [torch.randn(size, dim, **of) for size in (8192, 2049)]
    grad = torch.randn(tokens, dim, **of).to(kind)
    how: dict[str, Any] = {"scale": dim**0.5, "dropout": Dropout(rate, 3)}
    assemble.backward(grad, assemble.plan(edges, times, *way, **sizes), positions=8192, **how)
    assemble.forward(*parts, plan=assemble.plan(edges, times, *way, **sizes), **how)
    with no_waiting():
        plan = assemble.plan(edges, times, *way, **sizes)
        out = assemble.forward(*parts, plan=plan, **how, impl="triton")
        actual = [assemble.backward(grad, plan, positions=8192, **how, impl="triton") for _ in range(2)]
    wide = [part.double() for part in parts]
    expected = assemble.forward(*wide, plan=plan, **how, impl="reference")
    wanted = assemble.backward(grad.double(), plan, positions=8192, **how, impl="reference")
    close = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[kind]
    assert apart(out, expected) < close
    # Dropout scales the gradient before it is summed, which rounds it once more.
    within = [close, *[1e-5 if kind == torch.float32 or not rate else close] * 4]
    assert all(apart(got, want) < most for got, want, most in zip(actual[0], wanted, within))
    assert all(torch.equal(one, other) for one, other in zip(*actual))


def test_the_edges_of_ages_are_those_of_a_cpu() -> None:
    """Every square of minutes and the seconds around it: division and root must round alike everywhere."""
    roots = torch.arange(2100)
    behind = (60 * roots * roots)[:, None] + torch.tensor([-5, -1, 0, 1, 5])
    times = torch.cat([26_000_000_000 - behind.flatten(), torch.tensor([26_000_000_000])])
    edges = torch.tensor([0, times.numel()])
    assert torch.equal(ages_of(edges.cuda(), times.cuda(), 2049).cpu(), ages_of(edges, times, 2049))
