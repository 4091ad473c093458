"""Layer norm and its gate: values and every gradient against autograd of the plain formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_rows import close, drawn
from torch import Tensor
from torch.nn import functional as F

from recperf.ops.layer_norm import choose, layer_norm, swish_layer_norm

BODIES = ["reference", "triton"]
SHAPES = [(0, 8), (1, 600), (63, 40), (1, 2048), (300, 3)]
CASES = [
    *((impl, torch.float32, shape) for impl in BODIES for shape in SHAPES),
    *((impl, kind, (63, 40)) for impl in BODIES for kind in (torch.bfloat16, torch.float16)),
    ("reference", torch.float64, (63, 40)),
]
"""Every shape in float32, every type in one shape; the kernels compute in float32."""
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
"""Largest difference from float64, of the largest number; a GPU rounds to bfloat16 where the interpreter cuts."""
EPS = 1e-5


def plain(x: Tensor, weight: Tensor, bias: Tensor, swish: bool) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return x * normed.sigmoid() if swish else normed


def exact(inputs: list[Tensor], gradient: Tensor, swish: bool) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out = plain(leaves[0], leaves[1], leaves[2], swish)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient.double())


@pytest.mark.parametrize("swish", [False, True])
@pytest.mark.parametrize(("impl", "kind", "shape"), CASES)
@pytest.mark.usefixtures("poisoned")
def test_values_and_gradients(impl: Any, kind: torch.dtype, shape: tuple[int, int], swish: bool) -> None:
    rows, columns = shape
    wide = torch.float64 if kind == torch.float64 else torch.float32
    x = (drawn(rows, columns) * 2 + 0.5).to(kind).requires_grad_()
    weight, bias = (drawn(columns, seed=seed).to(wide).requires_grad_() for seed in (1, 2))
    gradient = drawn(rows, columns, seed=3).to(kind)
    out = (swish_layer_norm if swish else layer_norm)(x, weight, bias, EPS, impl)
    out.backward(gradient)
    assert out.dtype == kind
    actual = (out.detach(), x.grad, weight.grad, bias.grad)
    for name, got, expected in zip(("out", "x", "weight", "bias"), actual, exact([x, weight, bias], gradient, swish)):
        assert got is not None
        close(got, expected, LIMIT[kind], name)


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.usefixtures("poisoned")
def test_strided_rows_more_dimensions_and_a_residual(impl: Any) -> None:
    body, _ = choose(impl, torch.device("cpu"))
    wide, gradients, residuals = drawn(11, 90), drawn(11, 70, seed=1), drawn(11, 80, seed=2)
    weight, bias = drawn(40, seed=3), drawn(40, seed=4)
    x, gradient, residual = wide[:, 5:45], gradients[:, :40], residuals[:, 40:]
    for swish in (False, True):
        expected = exact([x, weight, bias], gradient, swish)
        out, stats = body.forward(x, weight, bias, EPS, swish=swish)
        close(out, expected[0], LIMIT[torch.float32])
        actual = body.backward(gradient, x, weight, bias, stats, swish=swish, residual_TD=residual)
        close(actual[0], expected[1] + residual.double(), LIMIT[torch.float32])
        close(actual[1], expected[2], LIMIT[torch.float32])
        close(actual[2], expected[3], LIMIT[torch.float32])
    for view in (x.reshape(11, 1, 40).expand(11, 3, 40), drawn(40, 11).t()):
        expected_view = plain(view.double(), weight.double(), bias.double(), False)
        close(layer_norm(view, weight, bias, EPS, impl), expected_view, LIMIT[torch.float32])
