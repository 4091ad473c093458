"""The way into an STU layer: values and every gradient against autograd of the plain formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_rows import close, drawn
from torch import Tensor
from torch.nn import functional as F

from recperf.ops import stu_input
from recperf.ops.products import product, weight_gradient

BODIES = ["reference", "triton"]
SHAPES = [(0, 8, 12), (1, 4, 1), (63, 40, 72), (70, 3, 7)]
CASES = [
    *((impl, torch.float32, shape) for impl in BODIES for shape in SHAPES),
    *((impl, kind, (63, 40, 72)) for impl in BODIES for kind in (torch.bfloat16, torch.float16)),
    ("reference", torch.float64, (63, 40, 72)),
]
"""Every shape in float32, every type in one shape; the kernels compute in float32."""
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.6e-2}
"""Largest difference from float64, of the largest number; a GPU rounds to bfloat16 where the interpreter cuts."""
EPS = 1e-6


def parameters(width: int, outputs: int) -> list[Tensor]:
    """Norm weight and bias, map and bias, in float32."""
    return [drawn(width, seed=1), drawn(width, seed=2), drawn(width, outputs, seed=3), drawn(outputs, seed=4)]


def exact(x: Tensor, parameters: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, *parameters)]
    rows, norm_weight, norm_bias, weight, bias = leaves
    out = F.layer_norm(rows, rows.shape[-1:], norm_weight, norm_bias, EPS) @ weight + bias
    return out.detach(), *torch.autograd.grad(out, leaves, gradient.double())


NAMES = ("out", "x", "norm weight", "norm bias", "weight", "bias")


@pytest.mark.parametrize(("impl", "kind", "shape"), CASES)
@pytest.mark.usefixtures("poisoned")
def test_values_and_gradients(impl: Any, kind: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Of narrow activations with float32 weights, as under autocast."""
    tokens, width, outputs = shape
    wide = torch.float64 if kind == torch.float64 else torch.float32
    x, gradient = (drawn(tokens, width) + 0.5).to(kind), drawn(tokens, outputs, seed=5).to(kind)
    given = [tensor.to(wide) for tensor in parameters(width, outputs)]
    out, stats = stu_input.forward(x, *given, EPS, impl=impl)
    assert out.dtype == kind
    actual = stu_input.backward(gradient, x, *given[:3], stats, EPS, impl=impl)
    assert [tensor.dtype for tensor in actual] == [kind, wide, wide, wide, wide]
    for name, got, expected in zip(NAMES, (out, *actual), exact(x, given, gradient)):
        close(got, expected, LIMIT[kind], name)


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.usefixtures("poisoned")
def test_views_and_a_residual(impl: Any) -> None:
    """Rows of wider tensors, columns of a wider weight; the gradient that goes around the layer is added."""
    x, gradient, residual = drawn(13, 50)[:, 3:23], drawn(13, 90, seed=5)[:, 30:60], drawn(13, 44, seed=6)[:, 24:]
    norm_weight, norm_bias, weight, bias = parameters(20, 90)
    given = [norm_weight, norm_bias, weight[:, 30:60], bias[30:60]]
    kept = gradient.clone(), x.clone(), residual.clone()
    out, stats = stu_input.forward(x, *given, EPS, impl=impl)
    actual = stu_input.backward(gradient, x, *given[:3], stats, EPS, residual_TD=residual, impl=impl)
    expected = list(exact(x, given, gradient))
    expected[1] = expected[1] + residual.double()
    for name, got, right in zip(NAMES, (out, *actual), expected):
        close(got, right, LIMIT[torch.float32], name)
    for before, after in zip(kept, (gradient, x, residual)):
        assert torch.equal(before, after), "what is given stays as it is"


def test_sums_of_narrow_products_are_not_rounded() -> None:
    """Ones over more tokens than bfloat16 can count."""
    ones = torch.ones(1001, 2, dtype=torch.bfloat16)
    assert weight_gradient(ones, ones).tolist() == [[1001.0, 1001.0], [1001.0, 1001.0]]
    assert weight_gradient(ones, ones).dtype == torch.float32
    total = product(ones.t().contiguous(), ones, torch.ones(2))
    assert total.dtype == torch.bfloat16
    assert total.tolist() == [[1000.0, 1000.0], [1000.0, 1000.0]]
