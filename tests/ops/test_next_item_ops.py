"""Padded and packed heads, rotary positions and the gate of a feed-forward layer, against plain torch in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recperf.ops.layer_norm import layer_norm
from recperf.ops.padding import packed_heads, padded_heads
from recperf.ops.swiglu import swiglu

BODIES = ["reference", "triton"]
pytestmark = pytest.mark.usefixtures("poisoned")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Lengths:
    """Sequences of these lengths, one of them empty."""

    offsets_B1: Tensor
    longest: int
    rows_T: Tensor
    positions_T: Tensor

    @staticmethod
    def of(lengths: list[int]) -> Lengths:
        rows = [row for row, length in enumerate(lengths) for _ in range(length)]
        positions = [place for length in lengths for place in range(length)]
        offsets_B1 = torch.tensor([0, *lengths]).cumsum(0)
        return Lengths(offsets_B1, max(lengths), torch.tensor(rows), torch.tensor(positions))


def turned(part_LA: Tensor) -> Tensor:
    """Each pair of a number and the one half a head further as a complex number, times one of length 1."""
    half = part_LA.shape[1] // 2
    points = torch.complex(part_LA[:, :half], part_LA[:, half : 2 * half])
    speeds = torch.tensor([10_000 ** (-point / max(1, half)) for point in range(half)], dtype=torch.float64)
    angles = torch.arange(len(part_LA), dtype=torch.float64)[:, None] * speeds
    points = points * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([points.real, points.imag, part_LA[:, 2 * half :]], 1)


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize(("heads", "width"), [(2, 6), (1, 5), (3, 1), (1, 256)])
def test_heads_are_padded_rotated_and_packed(impl: Any, heads: int, width: int) -> None:
    lengths = [3, 0, 7, 1, 40]
    sequences, parts = Lengths.of(lengths), 3
    packed = drawn(sum(lengths), parts * heads * width).requires_grad_()
    exact = packed.detach().double().requires_grad_()
    padded = padded_heads(packed, sequences, heads=heads, parts=parts, rotated=2, impl=impl)
    back = packed_heads(padded[0] + padded[2], sequences, impl)
    expected = []
    for part in range(parts):
        of_part = exact[:, part * heads * width : (part + 1) * heads * width]
        rows = of_part.split(lengths)
        by_head = [torch.stack([turned(one) if part < 2 else one for one in row.split(width, 1)]) for row in rows]
        expected.append(torch.stack([F.pad(one, (0, 0, 0, 40 - one.shape[1])) for one in by_head]))
    sums = expected[0] + expected[2]
    flat = torch.cat([sums[row, :, :length].transpose(0, 1).flatten(1) for row, length in enumerate(lengths)])
    for got, wanted in zip((*padded, back), (*expected, flat)):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    weights = [drawn(*one.shape, seed=seed) for seed, one in enumerate((*expected, flat), 1)]
    sum((got * weight).sum() for got, weight in zip((*padded, back), weights)).backward()  # type: ignore[union-attr]
    sum((one * weight).sum() for one, weight in zip((*expected, flat), weights)).backward()  # type: ignore[union-attr]
    assert packed.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(packed.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", BODIES)
def test_products_of_rotated_heads_follow_the_distance(impl: Any) -> None:
    sequences, one = Lengths.of([30]), drawn(1, 2 * 8)
    queries, keys = padded_heads(one.expand(30, -1), sequences, heads=1, parts=2, rotated=2, impl=impl)
    products = queries[0, 0] @ keys[0, 0].t()
    torch.testing.assert_close(products[5:, 5:], products[:-5, :-5], rtol=1e-4, atol=1e-4)
    assert float((products[0, 1:] - products[0, :-1]).abs().min()) > 1e-4


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (0, 4), (3, 1030)])
def test_a_gate(impl: Any, rows: int, columns: int) -> None:
    both = drawn(rows, 2 * columns).requires_grad_()
    exact = both.detach().double().requires_grad_()
    fed, wanted = swiglu(both, impl), F.silu(exact[:, :columns]) * exact[:, columns:]
    torch.testing.assert_close(fed.double(), wanted, rtol=1e-5, atol=1e-6)
    weights = drawn(rows, columns, seed=1)
    (fed * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert both.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(both.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", BODIES)
def test_a_layer_norm_without_weights_in_another_type(impl: Any) -> None:
    x = drawn(9, 20).requires_grad_()
    exact = x.detach().double().requires_grad_()
    normed, wanted = layer_norm(x, None, None, 1e-6, impl, torch.bfloat16), F.layer_norm(exact, (20,), eps=1e-6)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed.double(), wanted, rtol=1e-2, atol=1e-3)
    weights = drawn(9, 20, seed=1).bfloat16()
    normed.backward(weights)
    wanted.backward(weights.double())
    assert x.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)
    assert math.isclose(float(x.grad.sum()), 0, abs_tol=1e-3)
