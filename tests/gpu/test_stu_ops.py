"""The kernels of STU input and output, layer norm and dropout, compiled for a GPU, on memory that holds NaN before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recperf.ops import layer_norm, stu_input, stu_output
from recperf.ops.dropout import Dropout, keep_mask

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("exact_products"),
]
EPS = 1e-6
KINDS = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Root mean square of the difference from float64, of that of the numbers."""
SHAPES = [(0, 8, 8), (1, 16, 16), (63, 40, 24), (5000, 512, 512), (4099, 64, 256), (3001, 100, 1000), (700, 512, 2048)]
"""Tokens, model width, attention width."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def close(got: Tensor, exact: Tensor, kind: torch.dtype, name: str) -> None:
    assert got.shape == exact.shape
    if exact.numel():
        error = float((got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp(min=1e-3))
        assert error <= LIMIT[kind], f"{name}: {error}"


def doubled(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "columns"), [(0, 8), (1, 4), (4097, 512), (513, 256), (77, 2048), (9000, 24)])
@pytest.mark.parametrize("swish", [False, True])
@pytest.mark.usefixtures("poisoned")
def test_layer_norm(tokens: int, columns: int, swish: bool, kind: torch.dtype) -> None:
    x, gradient = (drawn(tokens, columns) + 0.5).to(kind), drawn(tokens, columns, seed=1).to(kind)
    weight, bias, residual = drawn(columns, seed=2), drawn(columns, seed=3), drawn(tokens, columns, seed=4).to(kind)
    plain, body = (layer_norm.choose(name, x.device)[0] for name in ("reference", "triton"))  # type: ignore[arg-type]
    out, stats = body.forward(x, weight, bias, EPS, swish=swish)
    actual = body.backward(gradient, x, weight, bias, stats, swish=swish, residual_TD=residual)
    wide = doubled(gradient, x, weight, bias)
    right, exact_stats = plain.forward(*wide[1:], EPS, swish=swish)
    expected = plain.backward(*wide, exact_stats, swish=swish, residual_TD=residual.double())
    for name, got, exact in zip(("out", "x", "weight", "bias"), (out, *actual), (right, *expected)):
        close(got, exact, kind, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "width", "columns"), SHAPES)
@pytest.mark.usefixtures("poisoned")
def test_stu_input(tokens: int, width: int, columns: int, kind: torch.dtype) -> None:
    outputs = 4 * columns
    x, gradient = drawn(tokens, width).to(kind), drawn(tokens, outputs, seed=1).to(kind)
    residual = drawn(tokens, width, seed=2).to(kind)
    parameters = [drawn(width, seed=3), drawn(width, seed=4), drawn(width, outputs, seed=5), drawn(outputs, seed=6)]
    actual = []
    for _ in range(2):
        out, stats = stu_input.forward(x, *parameters, EPS)
        actual.append((out, *stu_input.backward(gradient, x, *parameters[:3], stats, EPS, residual_TD=residual)))
    wide, wide_gradient, wide_residual, *wide_parameters = doubled(x, gradient, residual, *parameters)
    right, stats = stu_input.forward(wide, *wide_parameters, EPS)
    expected = stu_input.backward(wide_gradient, wide, *wide_parameters[:3], stats, EPS, residual_TD=wide_residual)
    names = ("out", "x", "norm weight", "norm bias", "weight", "bias")
    for name, got, again, exact in zip(names, *actual, (right, *expected)):
        assert torch.equal(got, again), f"{name} repeats"
        close(got, exact, kind, name)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "width", "columns"), SHAPES)
@pytest.mark.usefixtures("poisoned")
def test_stu_output(tokens: int, width: int, columns: int, kind: torch.dtype, rate: float) -> None:
    attention, x, gradient = drawn(tokens, columns), drawn(tokens, width, seed=1), drawn(tokens, width, seed=2)
    attention, x, gradient = attention.to(kind), x.to(kind), gradient.to(kind)
    u = drawn(tokens, 4 * columns, seed=3).to(kind)[:, :columns]
    parameters = [drawn(columns, seed=4), drawn(columns, seed=5), drawn(3 * columns, width, seed=6)]
    dropout, actual = Dropout(rate, 11), []
    for _ in range(2):
        buffer = torch.full((tokens, 4 * columns), 5.0, device="cuda", dtype=kind)
        out, stats = stu_output.forward(attention, u, x, *parameters, EPS, dropout)
        into = buffer[:, columns : 2 * columns]
        total = torch.empty(columns, device="cuda")
        grads = stu_output.backward(gradient, attention, u, *parameters, stats, EPS, dropout, into_u=into, sum_E=total)
        assert grads[1].data_ptr() == into.data_ptr()
        assert bool((buffer[:, :columns] == 5.0).all() & (buffer[:, 2 * columns :] == 5.0).all())
        actual.append((out, *grads, total))
    wide_gradient, *rows = doubled(gradient, attention, u, x)
    wide = doubled(*parameters)
    right, stats = stu_output.forward(*rows, *wide, EPS, dropout)
    expected = stu_output.backward(wide_gradient, rows[0], rows[1], *wide, stats, EPS, dropout)
    names = ("out", "attention", "u", "norm weight", "norm bias", "weight", "sum of u")
    for name, got, again, exact in zip(names, *actual, (right, *expected, expected[1].sum(0))):
        assert torch.equal(got, again), f"{name} repeats"
        close(got, exact, kind, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [320, 512])
@pytest.mark.usefixtures("poisoned")
def test_what_is_dropped_is_the_same_everywhere(kind: torch.dtype, columns: int) -> None:
    tokens, dropout = 3000, Dropout(0.2, 99)
    kept = keep_mask(dropout, tokens, 3 * columns, "cuda")
    assert torch.equal(kept.cpu(), keep_mask(dropout, tokens, 3 * columns, "cpu"))
    body, _ = stu_output.choose("triton", kept.device)
    rows = [drawn(tokens, columns).abs().add(1.0).to(kind), drawn(tokens, columns, seed=1).abs().add(1.0).to(kind)]
    z, _ = body.gated(*rows, torch.zeros(columns, device="cuda"), torch.ones(columns, device="cuda"), EPS, dropout)
    assert torch.equal(z != 0, kept)
    some = torch.arange(5, tokens, 7, device="cuda")
    listed = Dropout(0.2, 99, some)
    picked = [one[some] for one in rows]
    again, _ = body.gated(*picked, torch.zeros(columns, device="cuda"), torch.ones(columns, device="cuda"), EPS, listed)
    assert torch.equal(again, z[some])


@pytest.mark.usefixtures("poisoned")
def test_more_than_two_billion_elements() -> None:
    """The last rows of a long batch give what they give alone, under their numbers."""
    tokens, columns, few = 1_500_000, 512, 50
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of GPU memory")
    kind = torch.bfloat16
    uvqk = torch.randn(tokens, 4 * columns, device="cuda", dtype=kind)
    attention, u = uvqk[:, columns : 2 * columns], uvqk[:, :columns]
    weight = drawn(3 * columns, columns).to(kind)
    norm_weight, norm_bias = drawn(columns, seed=1), drawn(columns, seed=2)
    x = torch.zeros(tokens, columns, device="cuda", dtype=kind)
    out, stats = stu_output.forward(attention, u, x, norm_weight, norm_bias, weight, EPS, Dropout(0.1, 3))
    last = torch.arange(tokens - few, tokens, device="cuda")
    alone = Dropout(0.1, 3, last)
    tail = [tensor[-few:].contiguous() for tensor in (attention, u, x)]
    right, tail_stats = stu_output.forward(*tail, norm_weight, norm_bias, weight, EPS, alone)
    torch.testing.assert_close(out[-few:], right, rtol=2e-2, atol=0.3)
    torch.testing.assert_close(stats[:, -few:], tail_stats)
    actual = stu_output.backward(
        out, attention, u, norm_weight, norm_bias, weight, stats, EPS, Dropout(0.1, 3), into_u=uvqk[:, -columns:]
    )
    expected = stu_output.backward(
        out[-few:].contiguous(), tail[0], tail[1], norm_weight, norm_bias, weight, tail_stats, EPS, alone
    )
    for place in (0, 1):
        close(actual[place][-few:], expected[place].double(), kind, "the last rows")
