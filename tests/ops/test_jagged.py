"""Jagged copies: every body against rows joined one by one."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from recperf.ops.jagged import concat, concat_dense, dense_offsets, split, split_dense

INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    # Whether Triton's interpreter runs a kernel is settled where it is defined. Other tests must not see the wish.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("recperf.ops.jagged.triton")

needs_triton = pytest.mark.skipif(not INTERPRETED, reason="no triton, or a GPU, where tests/gpu runs the kernels")
ALL = ["reference", pytest.param("triton", marks=needs_triton)]

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


LENGTHS = {
    "odd": ([1, 0, 3, 63], [2, 5, 0, 1]),
    "nothing first": ([0, 0, 0], [1, 63, 2]),
    "nothing second": ([4, 1], [0, 0]),
    "all empty": ([0, 0, 0], [0, 0, 0]),
    "one of each": ([1], [1]),
    "no rows": ([], []),
    "long": ([8, 8], [3000, 0]),
}


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def joined(a: Tensor, a_lengths: list[int], b: Tensor, b_lengths: list[int]) -> Tensor:
    pairs = zip(a.split(a_lengths), b.split(b_lengths))
    return torch.cat([part for pair in pairs for part in pair] or [b])


@pytest.mark.parametrize("dim", [1, 24, 600])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("impl", ALL)
def test_rows_are_joined_and_taken_apart(impl: Any, lengths: tuple[list[int], list[int]], dim: int) -> None:
    a_lengths, b_lengths = lengths
    if dim == 600 and sum(b_lengths) > 1000:
        b_lengths = [length // 50 for length in b_lengths]
    draw = torch.Generator().manual_seed(dim)
    a, b = (torch.randn(sum(some), dim, generator=draw) for some in (a_lengths, b_lengths))
    a_offsets, b_offsets = offsets(a_lengths), offsets(b_lengths)
    a, b = a.requires_grad_(), b.requires_grad_()
    out, out_offsets = concat(a, a_offsets, b, b_offsets, impl=impl)
    assert torch.equal(out, joined(a, a_lengths, b, b_lengths))
    assert out_offsets.tolist() == [one + other for one, other in zip(a_offsets.tolist(), b_offsets.tolist())]
    first, second = split(out, a_offsets, b_offsets, impl=impl)
    assert torch.equal(first, a)
    assert torch.equal(second, b)
    # Through both ways: what goes in with a weight comes back with it.
    weight = torch.randn(out.shape, generator=draw)
    (out * weight).sum().backward()
    expected = split(weight, a_offsets, b_offsets, first=a.shape[0], impl="reference")
    assert torch.equal(a.grad, expected[0])  # type: ignore[arg-type]
    assert torch.equal(b.grad, expected[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", ALL)
def test_the_gradient_of_taking_apart_is_joined(impl: Any) -> None:
    a_lengths, b_lengths = LENGTHS["odd"]
    x = torch.randn(sum(a_lengths) + sum(b_lengths), 5, dtype=torch.float64, requires_grad=True)
    a_weight, b_weight = torch.randn(sum(a_lengths), 5), torch.randn(sum(b_lengths), 5)
    a, b = split(x, offsets(a_lengths), offsets(b_lengths), impl=impl)
    ((a * a_weight).sum() + (b * b_weight).sum()).backward()
    assert torch.equal(x.grad, joined(a_weight, a_lengths, b_weight, b_lengths).double())  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", ALL)
def test_one_half_without_a_gradient_gets_zeros(impl: Any) -> None:
    x = torch.randn(10, 3, requires_grad=True)
    split(x, offsets([2, 2]), offsets([3, 3]), impl=impl)[0].sum().backward()
    assert x.grad.sum(1).tolist() == [3.0, 3.0, 0.0, 0.0, 0.0, 3.0, 3.0, 0.0, 0.0, 0.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bfloat16])
@pytest.mark.parametrize("impl", ALL)
def test_tokens_may_be_numbers_of_any_type(impl: Any, kind: torch.dtype) -> None:
    a, b = torch.arange(4).to(kind), torch.arange(100, 166).to(kind) + (1 << 40 if kind == torch.int64 else 0)
    out, _ = concat(a, offsets([1, 3]), b, offsets([63, 3]), impl=impl)
    assert torch.equal(out, joined(a, [1, 3], b, [63, 3]))
    assert out.dtype == kind


@pytest.mark.parametrize("impl", ALL)
def test_rows_of_equally_many_tokens(impl: Any) -> None:
    a, b, b_lengths = torch.randn(3, 8, 4), torch.randn(6, 4), [0, 5, 1]
    out, out_offsets = concat_dense(a, b, offsets(b_lengths), impl=impl)
    assert torch.equal(out, joined(a.flatten(0, 1), [8] * 3, b, b_lengths))
    assert out_offsets.tolist() == [0, 8, 21, 30]
    back = split_dense(out, 8, offsets(b_lengths), impl=impl)
    assert torch.equal(back[0], a)
    assert torch.equal(back[1], b)
    assert dense_offsets(0, 8, torch.device("cpu")).tolist() == [0]
