"""Assembled tokens: every body against the plain formula in float64, token by token."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recperf.ops.assemble import AssemblyPlan, assemble, plan
from recperf.ops.dropout import Dropout, keep_mask
from recperf.ops.lookup import unique

ALL = ["reference", "triton"]

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one by one: as few as leave several blocks and groups of rows."""
    if importlib.util.find_spec("triton"):
        monkeypatch.setattr("recperf.ops.assemble.triton.PROGRAMS", 8)


LENGTHS = {
    "odd": [5, 0, 1, 20, 0],
    "63": [63],
    "context alone": [0, 0],
    "no rows": [],
    "one of one": [1],
}
NAMES = ("context", "rows", "actions", "position", "time")
POSITIONS, AGES, ACTIONS, DIM = 30, 4, 2, 20


def batch(lengths: list[int], context: int, dim: int = DIM) -> tuple[dict[str, Tensor], AssemblyPlan, Tensor]:
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


def rule(lengths: list[int], times: list[int], context: int) -> tuple[list[int], list[int]]:
    """Position and age of every token, one by one."""
    positions, ages, start = [], [], 0
    for length in lengths:
        for place in range(length):
            positions.append(min(place if place < context else length - 1 - place + context, POSITIONS - 1))
            gone = max(np.float32(times[start + length - 1] - times[start + place]), np.float32(1e-6))
            ages.append(min(int(np.sqrt(gone / np.float32(60))), AGES - 1))
        start += length
    return positions, ages


def plain(parts: dict[str, Tensor], of: AssemblyPlan, times: Tensor, dropout: Dropout) -> tuple[Tensor, ...]:
    """Row by row, by autograd, in float64."""
    leaves = {name: part.double().requires_grad_() for name, part in parts.items()}
    sequence = 5 * (leaves["rows"][of.source_S] + leaves["actions"][of.action_S])
    tokens, begin = [], 0
    for row, length in enumerate(of.offsets_B1.diff().tolist()):
        tokens += [5 * leaves["context"][row], sequence[begin : begin + length - of.context]]
        begin += length - of.context
    position, age = rule(of.offsets_B1.diff().tolist(), times.tolist(), of.context)
    out = torch.cat(tokens or [sequence]) + leaves["position"][position] + leaves["time"][age]
    out = out * keep_mask(dropout, *out.shape, "cpu") * dropout.scale
    weigh(out).backward()
    return out.detach(), *(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves.values())


def run(impl: Any, parts: dict[str, Tensor], of: AssemblyPlan, dropout: Dropout) -> tuple[Tensor, ...]:
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
    actual, expected = run(impl, parts, of, dropout), plain(parts, of, times, dropout)
    for name, got, correct in zip(("out", *NAMES), actual, expected):
        torch.testing.assert_close(got, correct.float(), rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("impl", ALL)
def test_half_tokens_with_whole_tables(impl: Any) -> None:
    kind = torch.bfloat16
    parts, of, times = batch([9, 0, 12], 8)
    parts = {name: part.to(kind) if name in NAMES[:3] else part for name, part in parts.items()}
    # Tokens of a part of a batch are dropped by their numbers in the whole one.
    dropout = Dropout(0.2, 1, 3 * torch.arange(len(times)) + 100)
    actual, expected = run(impl, parts, of, dropout), plain(parts, of, times, dropout)
    assert [part.dtype for part in actual] == [kind] * 4 + [torch.float32] * 2
    for got, correct in zip(actual, expected):
        assert float((got.double() - correct).norm() / correct.norm()) < 1e-2
