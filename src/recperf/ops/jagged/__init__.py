"""Two packed jagged tensors joined row by row, and taken apart: `reference` (plain torch) and `triton` (a GPU).

out, offsets_B1 = concat(a_SD, a_offsets_B1, b_TD, b_offsets_B1)
a_SD, b_TD = split(out, a_offsets_B1, b_offsets_B1, first=S)      # without `first` it is read on the host
offsets_B1 = dense_offsets(rows, tokens, device)                  # rows of equally many tokens, [B, n, D] as [B * n, D]

A token may be a vector of any type or one number. Shapes: B rows, S and T tokens of all rows, D width.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from .. import choice
from ..choice import Name

__all__ = ["Name", "choose", "concat", "concat_dense", "dense_offsets", "split", "split_dense"]


def choose(name: Name, device: torch.device) -> tuple[ModuleType, str]:
    """The implementation and why; an explicit wish that cannot be met is an error."""
    return choice.choose(
        __name__, name, device, what="jagged copy", subject="the tokens", fix="ask for the reference",
        bodies=("reference", "triton"),
    )  # fmt: skip


class _Concat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor, impl: Name) -> Tensor:
        ctx.save_for_backward(a_offsets, b_offsets)
        ctx.first, ctx.impl = a.shape[0], impl
        return cast(Tensor, choose(impl, b.device)[0].concat(a, a_offsets, b, b_offsets))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = choose(ctx.impl, grads[0].device)[0].split(grads[0], *ctx.saved_tensors, ctx.first)
        return a, None, b, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a_offsets: Tensor, b_offsets: Tensor, first: int, impl: Name
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a_offsets, b_offsets)
        ctx.impl = impl
        return cast(tuple[Tensor, Tensor], choose(impl, x.device)[0].split(x, a_offsets, b_offsets, first))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a_offsets, b_offsets = ctx.saved_tensors
        joined = choose(ctx.impl, grads[0].device)[0].concat(grads[0], a_offsets, grads[1], b_offsets)
        return joined, None, None, None, None


def concat(
    a: Tensor, a_offsets_B1: Tensor, b: Tensor, b_offsets_B1: Tensor, *, impl: Name = "auto"
) -> tuple[Tensor, Tensor]:
    """Every row of the first followed by the same row of the second, and the offsets of that; differentiable."""
    joined: Tensor = _Concat.apply(a, a_offsets_B1, b, b_offsets_B1, impl)  # type: ignore[no-untyped-call]
    return joined, a_offsets_B1 + b_offsets_B1


def split(
    x: Tensor, a_offsets_B1: Tensor, b_offsets_B1: Tensor, *, first: int | None = None, impl: Name = "auto"
) -> tuple[Tensor, Tensor]:
    """What `concat` joined; differentiable. `first`: tokens of the first, else read on the host."""
    if first is None:
        first = int(a_offsets_B1[-1])
    a, b = _Split.apply(x, a_offsets_B1, b_offsets_B1, first, impl)  # type: ignore[no-untyped-call]
    return a, b


def dense_offsets(rows: int, tokens: int, device: torch.device) -> Tensor:
    """Of rows that have equally many tokens."""
    return torch.arange(rows + 1, device=device) * tokens


def concat_dense(a_BND: Tensor, b_TD: Tensor, b_offsets_B1: Tensor, *, impl: Name = "auto") -> tuple[Tensor, Tensor]:
    """The same where every row of the first has equally many tokens."""
    offsets_B1 = dense_offsets(a_BND.shape[0], a_BND.shape[1], b_TD.device)
    return concat(a_BND.flatten(0, 1), offsets_B1, b_TD, b_offsets_B1, impl=impl)


def split_dense(x_TD: Tensor, tokens: int, b_offsets_B1: Tensor, *, impl: Name = "auto") -> tuple[Tensor, Tensor]:
    """What `concat_dense` joined."""
    rows = b_offsets_B1.numel() - 1
    offsets_B1 = dense_offsets(rows, tokens, x_TD.device)
    a_SD, b_TD = split(x_TD, offsets_B1, b_offsets_B1, first=rows * tokens, impl=impl)
    return a_SD.view(rows, tokens, *x_TD.shape[1:]), b_TD
