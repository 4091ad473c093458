"""The kernels of next-item blocks compiled for a GPU, against plain torch in float64, on memory that holds NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recperf.data.next_item import NextItemData
from recperf.data.next_item_batches import EventsOnDevice, SequenceBatch
from recperf.models.next_item.transformer import Pairs
from recperf.ops.layer_norm import layer_norm
from recperf.ops.padding import packed_heads, padded_heads
from recperf.ops.swiglu import swiglu

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("poisoned"),
]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def batch_of(lengths: list[int]) -> SequenceBatch:
    offsets_U1 = np.concatenate([[0], np.cumsum(np.array(lengths) + 1)])
    data = NextItemData(
        name="drawn", items=30, users=len(lengths), offsets_U1=offsets_U1,
        items_E=np.ones(offsets_U1[-1], np.int32), times_E=None,
    )  # fmt: skip
    events = EventsOnDevice(data, torch.device("cuda"))
    return events.batch(torch.from_numpy(offsets_U1[:-1]), torch.tensor(lengths))


def apart(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach(), expected.detach()
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize(("heads", "width"), [(4, 48), (1, 256), (2, 25)])
def test_heads_are_padded_rotated_and_packed(heads: int, width: int, kind: torch.dtype, no_waiting: Any) -> None:
    draw = np.random.default_rng(1)
    batch = batch_of(draw.integers(1, 201, 128).tolist())
    batch.rows_T  # noqa: B018
    shape = (len(batch.positions_T), 3 * heads * width)
    packed = torch.randn(shape, device="cuda").to(kind).requires_grad_()
    exact = packed.detach().double().requires_grad_()

    def both(rows: Tensor, impl: Any) -> tuple[Tensor, Tensor]:
        q, k, v = padded_heads(rows, batch, heads=heads, parts=3, rotated=2, impl=impl)
        out = packed_heads(q * k + v, batch, impl)
        return out, torch.autograd.grad(out.sum(), rows)[0]

    both(packed, "triton")
    with no_waiting():
        actual = both(packed, "triton")
    assert all(torch.equal(*pair) for pair in zip(actual, both(packed, "triton")))
    for got, expected in zip(actual, both(exact, "reference")):
        assert apart(got, expected) < LIMITS[kind]


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("columns", [768, 1024, 33])
def test_a_gate(columns: int, kind: torch.dtype) -> None:
    rows = torch.randn(5001, 2 * columns, device="cuda").to(kind).requires_grad_()
    exact = rows.detach().double().requires_grad_()
    fed, expected = swiglu(rows), F.silu(exact[:, :columns]) * exact[:, columns:]
    assert apart(fed, expected) < LIMITS[kind]
    gradients = [torch.autograd.grad(out.square().sum(), leaf)[0] for out, leaf in ((fed, rows), (expected, exact))]
    assert apart(*gradients) < LIMITS[kind]


@pytest.mark.parametrize("columns", [96, 192])
def test_a_layer_norm_without_weights_in_another_type(columns: int) -> None:
    rows = torch.randn(5001, columns, device="cuda").requires_grad_()
    exact = rows.detach().double().requires_grad_()
    normed = layer_norm(rows, None, None, 1e-6, kind=torch.bfloat16)
    expected = F.layer_norm(exact, (columns,), eps=1e-6)
    assert normed.dtype == torch.bfloat16
    assert apart(normed, expected) < LIMITS[torch.bfloat16]
    weights = torch.randn_like(normed)
    gradient, wanted = (
        torch.autograd.grad(normed, rows, weights),
        torch.autograd.grad(expected, exact, weights.double()),
    )
    assert gradient[0].dtype == torch.float32
    assert apart(gradient[0], wanted[0]) < 1e-5


def test_a_bias_by_time_is_summed_in_order_also_in_a_graph() -> None:
    """As many pairs as 128 sequences of 200 have, nearly all of them in one bucket."""
    draw = torch.Generator("cuda").manual_seed(1)
    buckets_BLL = (128 * torch.rand(128, 200, 200, device="cuda", generator=draw) ** 20).long()
    values_K = torch.randn(128, device="cuda", generator=draw).requires_grad_()
    weights_BLL = torch.rand(128, 200, 200, device="cuda", generator=draw)

    def gradient() -> Tensor:
        return torch.autograd.grad((Pairs(buckets_BLL, 128).of(values_K) * weights_BLL).sum(), values_K)[0]

    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first = gradient()
    begun.record()
    again = gradient()
    ended.record()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, again)
    assert torch.equal(first, captured)
    expected = torch.zeros(128, dtype=torch.float64, device="cuda")
    assert apart(first, expected.index_add_(0, buckets_BLL.flatten(), weights_BLL.flatten().double())) < 1e-5
    assert begun.elapsed_time(ended) < 100, "torch's own gradient of an index takes seconds"
