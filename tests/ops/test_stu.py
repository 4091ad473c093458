"""Layer norm and the ways into and out of an STU layer: values and every gradient against autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recperf.ops import stu_input, stu_output
from recperf.ops.dropout import Dropout, keep_mask
from recperf.ops.layer_norm import choose, layer_norm, swish_layer_norm
from recperf.ops.products import product, weight_gradient

BODIES = ["reference", "triton"]
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.6e-2}
"""Largest difference from float64, of the largest number; a GPU rounds to bfloat16 where the interpreter cuts."""
NORM_LIMIT = {**LIMIT, torch.float16: 6e-4, torch.bfloat16: 8e-3}
"""Of layer norm alone, which has no products."""
EPS, NORM_EPS = 1e-6, 1e-5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(actual: Tensor, exact: Tensor, limit: float, name: str = "") -> None:
    """The largest difference, relative to the largest value, is within the limit."""
    assert actual.shape == exact.shape
    if exact.numel():
        error = float((actual.double() - exact).abs().max() / exact.abs().max().clamp(min=0.1))
        assert error <= limit, name


def cases(typical: tuple[int, ...], *more: tuple[int, ...]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Every shape in float32, every type in a typical one; the kernels compute in float32."""
    return [
        *((impl, torch.float32, shape) for impl in BODIES for shape in (typical, *more)),
        *((impl, kind, typical) for impl in BODIES for kind in (torch.bfloat16, torch.float16)),
        ("reference", torch.float64, typical),
    ]


def plain(x: Tensor, weight: Tensor, bias: Tensor, swish: bool) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:], weight, bias, NORM_EPS)
    return x * normed.sigmoid() if swish else normed


def exact_norm(inputs: list[Tensor], gradient: Tensor, swish: bool) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out = plain(leaves[0], leaves[1], leaves[2], swish)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient.double())


@pytest.mark.parametrize("swish", [False, True])
@pytest.mark.parametrize(("impl", "kind", "shape"), cases((63, 40), (0, 8), (1, 600), (1, 2048), (300, 3)))
@pytest.mark.usefixtures("poisoned")
def test_layer_norm(impl: Any, kind: torch.dtype, shape: tuple[int, int], swish: bool) -> None:
    rows, columns = shape
    wide = torch.float64 if kind == torch.float64 else torch.float32
    x = (drawn(rows, columns) * 2 + 0.5).to(kind).requires_grad_()
    weight, bias = (drawn(columns, seed=seed).to(wide).requires_grad_() for seed in (1, 2))
    gradient = drawn(rows, columns, seed=3).to(kind)
    out = (swish_layer_norm if swish else layer_norm)(x, weight, bias, NORM_EPS, impl)
    out.backward(gradient)
    assert out.dtype == kind
    actual = (out.detach(), x.grad, weight.grad, bias.grad)
    for name, got, expected in zip(
        ("out", "x", "weight", "bias"), actual, exact_norm([x, weight, bias], gradient, swish)
    ):
        assert got is not None
        close(got, expected, NORM_LIMIT[kind], name)


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.usefixtures("poisoned")
def test_strided_rows_more_dimensions_and_a_residual(impl: Any) -> None:
    body, _ = choose(impl, torch.device("cpu"))
    wide, gradients, residuals = drawn(11, 90), drawn(11, 70, seed=1), drawn(11, 80, seed=2)
    weight, bias = drawn(40, seed=3), drawn(40, seed=4)
    x, gradient, residual = wide[:, 5:45], gradients[:, :40], residuals[:, 40:]
    for swish in (False, True):
        expected = exact_norm([x, weight, bias], gradient, swish)
        out, stats = body.forward(x, weight, bias, NORM_EPS, swish=swish)
        close(out, expected[0], NORM_LIMIT[torch.float32])
        actual = body.backward(gradient, x, weight, bias, stats, swish=swish, residual_TD=residual)
        close(actual[0], expected[1] + residual.double(), NORM_LIMIT[torch.float32])
        close(actual[1], expected[2], NORM_LIMIT[torch.float32])
        close(actual[2], expected[3], NORM_LIMIT[torch.float32])
    for view in (x.reshape(11, 1, 40).expand(11, 3, 40), drawn(40, 11).t()):
        expected_view = plain(view.double(), weight.double(), bias.double(), False)
        close(layer_norm(view, weight, bias, NORM_EPS, impl), expected_view, NORM_LIMIT[torch.float32])


def parameters(width: int, outputs: int) -> list[Tensor]:
    """Norm weight and bias, map and bias, in float32."""
    return [drawn(width, seed=1), drawn(width, seed=2), drawn(width, outputs, seed=3), drawn(outputs, seed=4)]


def exact_input(x: Tensor, parameters: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, *parameters)]
    rows, norm_weight, norm_bias, weight, bias = leaves
    out = F.layer_norm(rows, rows.shape[-1:], norm_weight, norm_bias, EPS) @ weight + bias
    return out.detach(), *torch.autograd.grad(out, leaves, gradient.double())


INPUT_NAMES = ("out", "x", "norm weight", "norm bias", "weight", "bias")


@pytest.mark.parametrize(("impl", "kind", "shape"), cases((63, 40, 72), (0, 8, 12), (1, 4, 1), (70, 3, 7)))
@pytest.mark.usefixtures("poisoned")
def test_stu_input(impl: Any, kind: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Of narrow activations with float32 weights, as under autocast."""
    tokens, width, outputs = shape
    wide = torch.float64 if kind == torch.float64 else torch.float32
    x, gradient = (drawn(tokens, width) + 0.5).to(kind), drawn(tokens, outputs, seed=5).to(kind)
    given = [tensor.to(wide) for tensor in parameters(width, outputs)]
    out, stats = stu_input.forward(x, *given, EPS, impl=impl)
    assert out.dtype == kind
    actual = stu_input.backward(gradient, x, *given[:3], stats, EPS, impl=impl)
    assert [tensor.dtype for tensor in actual] == [kind, wide, wide, wide, wide]
    for name, got, expected in zip(INPUT_NAMES, (out, *actual), exact_input(x, given, gradient)):
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
    expected = list(exact_input(x, given, gradient))
    expected[1] = expected[1] + residual.double()
    for name, got, right in zip(INPUT_NAMES, (out, *actual), expected):
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


OUTPUT_NAMES = ("out", "attention", "u", "norm weight", "norm bias", "weight")


def inputs(tokens: int, width: int, columns: int, kind: torch.dtype) -> list[Tensor]:
    """Attention, u (as it lies among v, q and k), x; norm weight and bias, map: these in float32."""
    wide = torch.float64 if kind == torch.float64 else torch.float32
    rows = [drawn(tokens, columns) * 0.3 + 0.1, drawn(tokens, 4 * columns + 1, seed=1), drawn(tokens, width, seed=2)]
    rows[1] = rows[1].to(kind)[:, 1 : columns + 1]
    weights = [drawn(columns, seed=3), drawn(columns, seed=4), drawn(3 * columns, width, seed=5)]
    return [tensor.to(kind) for tensor in rows] + [tensor.to(wide) for tensor in weights]


def exact_output(given: list[Tensor], dropout: Dropout, gradient: Tensor) -> tuple[Tensor, ...]:
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
@pytest.mark.parametrize(
    ("impl", "kind", "shape"), cases((63, 40, 24), (0, 8, 12), (1, 1, 4), (1, 5, 1100), (70, 7, 3))
)
@pytest.mark.usefixtures("poisoned")
def test_stu_output(impl: Any, kind: torch.dtype, shape: tuple[int, int, int], rate: float) -> None:
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
    for name, got, expected in zip(OUTPUT_NAMES, (out, *actual), exact_output(given, dropout, gradient)):
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
