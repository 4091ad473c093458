"""The way out of an STU layer: values and every gradient against autograd of the plain formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_rows import close, drawn
from torch import Tensor
from torch.nn import functional as F

from recperf.ops import stu_output
from recperf.ops.dropout import Dropout, keep_mask

BODIES = ["reference", "triton"]
SHAPES = [(0, 8, 12), (1, 1, 4), (63, 40, 24), (1, 5, 1100), (70, 7, 3)]
CASES = [
    *((impl, torch.float32, shape) for impl in BODIES for shape in SHAPES),
    *((impl, kind, (63, 40, 24)) for impl in BODIES for kind in (torch.bfloat16, torch.float16)),
    ("reference", torch.float64, (63, 40, 24)),
]
"""Every shape in float32, every type in one shape; the kernels compute in float32."""
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.6e-2}
"""Largest difference from float64, of the largest number; a GPU rounds to bfloat16 where the interpreter cuts."""
EPS = 1e-6
NAMES = ("out", "attention", "u", "norm weight", "norm bias", "weight")


def inputs(tokens: int, width: int, columns: int, kind: torch.dtype) -> list[Tensor]:
    """Attention, u (as it lies among v, q and k), x; norm weight and bias, map: these in float32."""
    wide = torch.float64 if kind == torch.float64 else torch.float32
    rows = [drawn(tokens, columns) * 0.3 + 0.1, drawn(tokens, 4 * columns + 1, seed=1), drawn(tokens, width, seed=2)]
    rows[1] = rows[1].to(kind)[:, 1 : columns + 1]
    weights = [drawn(columns, seed=3), drawn(columns, seed=4), drawn(3 * columns, width, seed=5)]
    return [tensor.to(kind) for tensor in rows] + [tensor.to(wide) for tensor in weights]


def exact(given: list[Tensor], dropout: Dropout, gradient: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().double().requires_grad_() for tensor in given]
    attention, u, x, norm_weight, norm_bias, weight = leaves
    gate = F.silu(u)
    z = torch.cat(
        [gate, attention, gate * F.layer_norm(attention, attention.shape[1:], norm_weight, norm_bias, EPS)], 1
    )
    z = z * keep_mask(dropout, z.shape[0], z.shape[1], "cpu") / (1 - dropout.rate)
    out = x + z @ weight
    return out.detach(), *torch.autograd.grad(out, [leaves[place] for place in (0, 1, 3, 4, 5)], gradient.double())


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("impl", "kind", "shape"), CASES)
@pytest.mark.usefixtures("poisoned")
def test_values_and_gradients(impl: Any, kind: torch.dtype, shape: tuple[int, int, int], rate: float) -> None:
    """Of narrow activations with float32 weights, as under autocast."""
    tokens, width, columns = shape
    given, gradient = inputs(tokens, width, columns, kind), drawn(tokens, width, seed=6).to(kind)
    kept = [tensor.clone() for tensor in (*given, gradient)]
    dropout = Dropout(rate, seed=tokens)
    out, stats = stu_output.forward(*given, EPS, dropout, impl=impl)
    assert out.dtype == kind
    attention, u, _, *parameters = given
    actual = stu_output.backward(gradient, attention, u, *parameters, stats, EPS, dropout, impl=impl)
    wide = parameters[0].dtype
    assert [tensor.dtype for tensor in actual] == [kind, kind, wide, wide, wide]
    for name, got, expected in zip(NAMES, (out, *actual), exact(given, dropout, gradient)):
        close(got, expected, LIMIT[kind], name)
    for before, after in zip(kept, (*given, gradient)):
        assert torch.equal(before, after), "what is given stays as it is"


@pytest.mark.parametrize("impl", BODIES)
def test_chosen_rows_give_what_they_give_among_all(impl: Any) -> None:
    """As when only the last token of every row is asked for: the same output and the same dropout."""
    given, gradient = inputs(40, 12, 20, torch.float32), drawn(40, 12, seed=6)
    chosen = torch.tensor([3, 4, 22, 39])
    some = [*(tensor[chosen] for tensor in given[:3]), *given[3:]]
    every, few = Dropout(0.3, 5), Dropout(0.3, 5, chosen)
    out, stats = stu_output.forward(*given, EPS, every, impl=impl)
    fewer, few_stats = stu_output.forward(*some, EPS, few, impl=impl)
    torch.testing.assert_close(fewer, out[chosen])
    attention, u, _, *parameters = given
    masked = torch.zeros_like(gradient)
    masked[chosen] = gradient[chosen]
    full = stu_output.backward(masked, attention, u, *parameters, stats, EPS, every, impl=impl)
    part = stu_output.backward(gradient[chosen], some[0], some[1], *parameters, few_stats, EPS, few, impl=impl)
    for one, other in zip((full[0][chosen], full[1][chosen], *full[2:]), part):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
