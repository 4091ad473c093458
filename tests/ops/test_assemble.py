"""Tokens put together in one pass: every body against the plain formula in float64, and the ops it stands for."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recperf.ops.assemble import Plan, assemble, backward, forward, plan
from recperf.ops.dropout import Dropout, drop, keep_mask
from recperf.ops.jagged import concat_dense
from recperf.ops.lookup import unique
from recperf.ops.position_time import buckets, position_time

INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    # Whether Triton's interpreter runs a kernel is settled where it is defined. Other tests must not see the wish.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("recperf.ops.assemble.triton")

needs_triton = pytest.mark.skipif(not INTERPRETED, reason="no triton, or a GPU, where tests/gpu runs the kernels")
ALL = ["reference", pytest.param("triton", marks=needs_triton)]

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        # The interpreter takes a program after the other: as few as leave several blocks and groups of rows.
        monkeypatch.setattr("recperf.ops.position_time.triton.PROGRAMS", 8)


LENGTHS = {
    "odd": [5, 0, 1, 20, 0],
    "63": [63],
    "context alone": [0, 0],
    "no rows": [],
    "one of one": [1],
}
NAMES = ("context", "rows", "actions", "position", "time")
POSITIONS, AGES, ACTIONS, DIM = 30, 4, 2, 20


def batch(lengths: list[int], context: int, dim: int = DIM) -> tuple[dict[str, Tensor], Plan, Tensor]:
    """Parts, plan and times of rows with this many positions after their context."""
    draw = torch.Generator().manual_seed(len(lengths) + context)
    positions = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0) + context * torch.arange(len(lengths) + 1)
    times = torch.randint(0, 1500, (int(offsets[-1]),), generator=draw) // 5 * 5
    ids = unique(torch.randint(0, 7, (positions,), generator=draw))
    codes = torch.randint(0, ACTIONS, (positions,), generator=draw)
    sizes = {
        "context": (len(lengths), context), "rows": (ids.values_U.numel(),), "actions": (ACTIONS,),
        "position": (POSITIONS,), "time": (AGES,),
    }  # fmt: skip
    parts = {name: torch.randn(*size, dim, generator=draw) for name, size in sizes.items()}
    made = plan(
        offsets, times, ids.inverse_N, ids.order_N, ids.starts_U1, codes,
        actions=ACTIONS, ages=AGES, context=context, longest=max(lengths, default=0) + context + 1,
    )  # fmt: skip
    return parts, made, times


def weigh(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()


def plain(parts: dict[str, Tensor], of: Plan, times: Tensor, dropout: Dropout) -> tuple[Tensor, ...]:
    """Row by row, by autograd, in float64."""
    leaves = {name: part.double().requires_grad_() for name, part in parts.items()}
    sequence = 5 * (leaves["rows"][of.source_S] + leaves["actions"][of.action_S])
    tokens, begin = [], 0
    for row, length in enumerate(of.offsets_B1.diff().tolist()):
        tokens += [5 * leaves["context"][row], sequence[begin : begin + length - of.context]]
        begin += length - of.context
    position, age = buckets(of.offsets_B1, times, positions=POSITIONS, ages=AGES, context=of.context)
    out = torch.cat(tokens or [sequence]) + leaves["position"][position] + leaves["time"][age]
    out = out * keep_mask(dropout, *out.shape, "cpu") * dropout.scale
    weigh(out).backward()
    return out.detach(), *(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves.values())


def run(impl: Any, parts: dict[str, Tensor], of: Plan, dropout: Dropout) -> tuple[Tensor, ...]:
    leaves = {name: part.clone().requires_grad_() for name, part in parts.items()}
    out = assemble(*leaves.values(), plan=of, scale=5.0, dropout=dropout, impl=impl)
    weigh(out).backward()
    return out.detach(), *(leaf.grad for leaf in leaves.values())  # type: ignore[return-value]


@pytest.mark.parametrize(("context", "rate"), [pytest.param(0, 0.3, marks=pytest.mark.long), (3, 0.0), (5, 0.3)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("impl", ALL)
def test_values_and_every_gradient(impl: Any, lengths: list[int], context: int, rate: float) -> None:
    parts, of, times = batch(lengths, context)
    dropout = Dropout(rate, 77)
    found, expected = run(impl, parts, of, dropout), plain(parts, of, times, dropout)
    for name, got, wanted in zip(("out", *NAMES), found, expected):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("impl", ALL)
def test_a_repeat_gives_the_same_bits(impl: Any) -> None:
    parts, of, _ = batch(LENGTHS["odd"], 3)
    found = [run(impl, parts, of, Dropout(0.3, 77)) for _ in range(2)]
    assert all(torch.equal(got, again) for got, again in zip(*found))


@pytest.mark.parametrize("impl", ALL)
def test_half_tokens_with_whole_tables(impl: Any) -> None:
    kind = torch.bfloat16
    parts, of, times = batch([9, 0, 12], 8)
    parts = {name: part.to(kind) if name in NAMES[:3] else part for name, part in parts.items()}
    found, expected = run(impl, parts, of, Dropout(0.2, 1)), plain(parts, of, times, Dropout(0.2, 1))
    assert [part.dtype for part in found] == [kind] * 4 + [torch.float32] * 2
    for got, wanted in zip(found, expected):
        assert float((got.double() - wanted).norm() / wanted.norm()) < 1e-2


@pytest.mark.parametrize("impl", ALL)
def test_the_ops_it_stands_for_give_the_same(impl: Any) -> None:
    parts, of, times = batch([5, 0, 1, 20], 8)
    dropout = Dropout(0.2, 5)
    sequence = parts["rows"][of.source_S] + parts["actions"][of.action_S]
    edges = of.offsets_B1 - 8 * torch.arange(5)
    joined, _ = concat_dense(parts["context"], sequence, edges, impl="reference")
    placed = position_time(
        joined, of.offsets_B1, times, parts["position"], parts["time"],
        scale=5.0, context=8, longest=of.longest, impl="reference",
    )  # fmt: skip
    found = forward(*parts.values(), plan=of, scale=5.0, dropout=dropout, impl=impl)
    torch.testing.assert_close(found, drop(placed, dropout, impl="reference"), rtol=1e-6, atol=1e-6)


def test_both_bodies_serve_the_two_halves() -> None:
    parts, of, _ = batch([3, 2], 2)
    grad = torch.randn(of.tokens, DIM, dtype=torch.float64)
    found = backward(grad, of, positions=POSITIONS, scale=2.0)
    assert [tuple(part.shape) for part in found] == [tuple(part.shape) for part in parts.values()]
    assert {part.dtype for part in found} == {torch.float64}


def test_a_plan_that_does_not_fit_is_refused() -> None:
    parts, of, _ = batch([3, 2], 2)
    for wrong in (
        {"rows": parts["rows"][1:]}, {"context": parts["context"][:, 1:]}, {"actions": parts["actions"][1:]},
        {"time": parts["time"][1:]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="planned"):
            forward(*(parts | wrong).values(), plan=of, scale=1.0)
    with pytest.raises(ValueError, match="one must be left"):
        forward(*(parts | {"position": parts["position"][:2]}).values(), plan=of, scale=1.0)
    with pytest.raises(ValueError, match="have 5 positions; 4 sources"):
        plan(
            of.offsets_B1, torch.zeros(9, dtype=torch.int64), of.source_S[:4], of.source_S, of.source_starts_U1,
            of.action_S, actions=2, ages=4, context=2, longest=5,
        )  # fmt: skip
    assert replace(of, longest=9).tokens == of.tokens
