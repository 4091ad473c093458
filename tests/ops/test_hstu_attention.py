"""HSTU attention by every body: against a dense oracle, and how far off each is."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from golden_cases import attention_limit
from torch import Tensor

from recperf.errors import ArgumentError
from recperf.ops.hstu_attention import Mask, RelativeBias, attention, reference

ALL = ["reference", "native", "triton"]
NAMES = ("out", "dq", "dk", "dv", "dpositions", "dbuckets")
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Mask]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few dozen tokens then have every kind of block: whole, on the diagonal, at the end."""
    monkeypatch.setattr(reference, "SCORES", 300)
    if importlib.util.find_spec("triton"):
        kernels = body("triton")
        monkeypatch.setattr(kernels, "forward_tiles", lambda width, itemsize, roomy: kernels.Tiles(32, 16, 4, 1))
        monkeypatch.setattr(kernels, "backward_tiles", lambda width, itemsize, roomy: kernels.Tiles(16, 32, 4, 1))
        monkeypatch.setattr(kernels, "CHUNK", 32)
        monkeypatch.setattr(kernels, "last_keys", lambda width: 16)


def body(name: str) -> ModuleType:
    return importlib.import_module(f"recperf.ops.hstu_attention.{name}")


def oracle(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, mask: Mask, bias: RelativeBias | None = None) -> Tensor:
    outs = []
    for first, last in zip(offsets.tolist(), offsets[1:].tolist()):
        scores = torch.einsum("mhd,nhd->hmn", q[first:last], k[first:last]) * mask.alpha
        if bias is not None:
            scores = scores + oracle_bias(bias, first, last)
        weights = (torch.nn.functional.silu(scores) / mask.length).tril()
        outs.append(torch.einsum("hmn,nhd->mhd", weights, v[first:last]))
    return torch.cat(outs) if outs else torch.zeros_like(v)


def oracle_bias(bias: RelativeBias, first: int, last: int) -> Tensor:
    places = torch.arange(last - first)
    values = bias.positions_P[(places[:, None] - places).clamp(min=0)]
    if bias.buckets_K is None or bias.query_times_T is None or bias.key_times_T is None:
        return values
    seconds = (bias.query_times_T[first:last, None] - bias.key_times_T[first:last]).abs().clamp(min=1)
    return values + bias.buckets_K[(seconds.double().log() / 0.301).long().clamp(max=len(bias.buckets_K) - 1)]


def exact(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, mask: Mask, bias: RelativeBias | None = None
) -> list[Tensor]:
    """The oracle's output and autograd's gradients in float64."""
    inputs = [given.double().clone().requires_grad_() for given in (q, k, v)]
    parts = () if bias is None else (bias.positions_P, bias.buckets_K)
    learned = [one.detach().double().requires_grad_() for one in parts if one is not None]
    if bias is not None:
        bias = replace(bias, positions_P=learned[0], buckets_K=learned[1] if learned[1:] else None)
    out = oracle(*inputs, offsets, mask, bias)
    out.backward(grad.double())
    return [out.detach(), *(torch.zeros_like(one) if one.grad is None else one.grad for one in (*inputs, *learned))]


def make(
    lengths: list[int], *, heads: int = 2, qk: int = 16, width: int = 16, dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:  # fmt: skip
    """Gradient, and q, k and v as views of one buffer, as the layer has them."""
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    buffer = torch.randn(tokens, heads * (2 * width + 2 * qk), generator=draw).to(dtype)
    _, v, q, k = buffer.split([heads * width, heads * width, heads * qk, heads * qk], 1)
    grad = torch.randn(tokens, heads, width, generator=draw).to(dtype)
    longest = max(lengths, default=0)
    mask = Mask(alpha=1 / qk**0.5, length=max(longest, 1), longest=longest)
    return grad, q.view(tokens, heads, qk), k.view(tokens, heads, qk), v.view(tokens, heads, width), offsets, mask


def off(got: Tensor, right: Tensor) -> float:
    """Relative to the norm of what is right."""
    assert got.shape == right.shape
    assert not got.isnan().any()
    return float((got.double() - right).norm() / right.norm().clamp(min=1e-30))


def hold(name: str, dtype: torch.dtype, got: Any, right: list[Tensor]) -> None:
    for what, mine, true in zip(NAMES, got, right):
        assert off(mine, true) <= attention_limit(name, dtype), what


LENGTHS = [65, 0, 1, 48]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ALL)
def test_output_and_gradients_are_the_oracles(name: str) -> None:
    grad, *inputs, offsets, mask = make(LENGTHS, heads=1)
    right = exact(grad, *inputs, offsets, mask)
    out = body(name).forward(*inputs, offsets, mask)
    hold(name, torch.float32, (out, *body(name).backward(grad, *inputs, offsets, mask)), right)
    again = body(name).backward(grad, *inputs, offsets, mask, deterministic=True)
    hold(name, torch.float32, (out, *again), right)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("qk", "width"), [(48, 32), (8, 80)])
@pytest.mark.parametrize("name", ALL)
def test_the_error_against_float64_is_below_its_limit(name: str, qk: int, width: int, dtype: torch.dtype) -> None:
    grad, q, k, v, offsets, mask = make([65, 1, 3], heads=1, qk=qk, width=width, dtype=dtype)
    right = exact(grad, q, k, v, offsets, mask)
    grads = body(name).backward(grad, q, k, v, offsets, mask)
    out = body(name).forward(q, k, v, offsets, mask)
    assert {actual.dtype for actual in (out, *grads)} == {dtype}
    hold(name, dtype, (out, *grads), right)
    # The last token of a row alone gets what all would give it.
    last = offsets[1:] - 1
    only = torch.zeros_like(grad)
    only[last] = grad[last]
    out, dq, dk, dv = exact(only, q, k, v, offsets, mask)
    got = (
        body(name).forward_last(q[last], k, v, offsets, mask),
        *body(name).backward_last(grad[last], q[last], k, v, offsets, mask),
    )
    assert {actual.dtype for actual in got} == {dtype}
    hold(name, dtype, got, [out[last], dq[last], dk, dv])


def make_bias(tokens: int, positions: int, *, times: bool, seed: int = 0) -> RelativeBias:
    """Times of a row go up and down, in steps of seconds to years; a few differences are the edges of buckets."""
    draw = torch.Generator().manual_seed(seed)
    positions_P = torch.randn(positions, generator=draw)
    if not times:
        return RelativeBias(positions_P)
    steps = torch.rand(tokens, generator=draw).mul(18).exp().long() * torch.randint(-1, 4, (tokens,), generator=draw)
    key_times_T = 1_700_000_000 + steps.cumsum(0)
    return RelativeBias(positions_P, torch.randn(60, generator=draw), key_times_T, key_times_T.roll(-1) + 1)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("lengths", "shape", "times"),
    [
        ([63, 0, 1, 48], {"qk": 25, "width": 25}, True),
        ([3, 70], {"heads": 1, "qk": 40, "width": 16}, False),
        ([0, 0], {}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ALL)
def test_a_relative_bias_and_its_gradients_are_the_oracles(
    name: str, lengths: list[int], shape: dict[str, int], times: bool
) -> None:
    grad, *inputs, offsets, mask = make(lengths, **shape)
    bias = make_bias(sum(lengths), mask.longest + 3, times=times)
    right = exact(grad, *inputs, offsets, mask, bias)
    out = body(name).forward(*inputs, offsets, mask, bias)
    gradients = body(name).backward_biased(grad, *inputs, offsets, mask, bias)
    assert (gradients[-1] is None) is not times
    hold(name, torch.float32, (out, *gradients), right)
    again = body(name).backward_biased(grad, *inputs, offsets, mask, bias)
    assert all(map(torch.equal, gradients[:-1], again)), "a repeat changes bits"


def test_attention_is_differentiable_in_what_a_bias_has_learned() -> None:
    grad, *inputs, offsets, mask = make([20, 5])
    bias = make_bias(25, 20, times=True)
    leaves = [one.requires_grad_() for one in (bias.positions_P, bias.buckets_K) if one is not None]
    right = exact(grad, *inputs, offsets, mask, bias)
    attention(*inputs, offsets, mask, bias=bias).backward(grad)
    hold("native", torch.float32, [one.grad for one in leaves], right[-2:])


@pytest.mark.parametrize(
    ("change", "message"), [({"window": 2}, "plain causal mask"), ({"longest": 21}, "21 tokens"), ({}, "one time")]
)
@pytest.mark.parametrize("name", ALL)
def test_a_bias_that_does_not_fit_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    _, *inputs, offsets, mask = make([20, 5])
    with pytest.raises(ArgumentError, match=message):
        body(name).forward(*inputs, offsets, replace(mask, **change), make_bias(25 - (not change), 20, times=True))


@pytest.mark.parametrize("name", ALL)
def test_what_lies_outside_a_row_is_not_read(name: str) -> None:
    """NaN around the rows and beside the heads would show."""
    grad, q, k, v, offsets, mask = make([20, 31])
    wide = torch.full((51 + 64, 3, 2, 32), torch.nan)
    for at, part in enumerate((q, k, v)):
        wide[:51, at, :, :16] = part
    inputs = [wide[:51, at, :, :16] for at in range(3)]
    hold(name, torch.float32, (body(name).forward(*inputs, offsets, mask),), exact(grad, q, k, v, offsets, mask))
    hold(
        name,
        torch.float32,
        (q, *body(name).backward(grad, *inputs, offsets, mask)),
        [q.double(), *exact(grad, q, k, v, offsets, mask)[1:]],
    )


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("name", ALL)
def test_rows_without_tokens_give_nothing(name: str, lengths: list[int]) -> None:
    grad, q, k, v, offsets, mask = make(lengths)
    assert body(name).forward(q, k, v, offsets, mask).shape == (0, 2, 16)
    assert [actual.shape[0] for actual in body(name).backward(grad, q, k, v, offsets, mask)] == [0, 0, 0]


def test_memory_does_not_grow_with_the_square_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of 4k would need 17M scores a head at once."""
    largest = 0
    forward = reference._forward

    def watched(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        nonlocal largest
        largest = max(largest, q.shape[0] * q.shape[1] * k.shape[1])
        return forward(q, k, *rest)

    monkeypatch.setattr(reference, "SCORES", 1 << 19)
    monkeypatch.setattr(reference, "_forward", watched)
    tokens = 4_096
    q = torch.ones(tokens, 1, 2)
    out = reference.forward(q, q, q, torch.tensor([0, tokens]), Mask(0.5, tokens, tokens))
    assert largest <= 1 << 19
    # Every score is SiLU(1), and a token sees as many as its place.
    expected = torch.nn.functional.silu(torch.ones(())) * torch.arange(1, tokens + 1) / tokens
    torch.testing.assert_close(out[:, 0, 0], expected)


def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    grad, *inputs, offsets, mask = make([30, 0, 61, 1, 17, 44], heads=2, qk=8, width=24)
    bias = make_bias(sum([30, 0, 61, 1, 17, 44]), 61, times=True)
    native = body("native")
    monkeypatch.setattr(native, "SMALL", 0)
    actual = []
    for threads in (1, 2, 5, 9):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        actual.append((native.forward(*inputs, offsets, mask), *native.backward(grad, *inputs, offsets, mask)))
        actual[-1] += native.backward_biased(grad, *inputs, offsets, mask, bias)
    for one in actual[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(one, actual[0]))
