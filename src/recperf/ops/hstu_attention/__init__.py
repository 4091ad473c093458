"""HSTU attention over packed rows of different lengths, SiLU(alpha q.k) / length under a mask: `reference` (plain
torch, any device), `native` (C, a CPU; for rows of up to 512 tokens) and `triton` (a GPU).

`attention` is differentiable; the others are its forward and backward pass, for callers with an own autograd function.
q, k, v and the tensors of `into` may be views with any stride between tokens, as pieces of one wider buffer are; the
numbers of a head lie together. Row b holds the tokens offsets_B1[b] .. offsets_B1[b + 1], and every token has a row.

Shapes: B rows, T tokens of all rows, H heads, A width of q and k, V width of v.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import choice
from ..choice import Name
from .rule import Mask

__all__ = ["Mask", "Name", "attention", "backward", "backward_last", "choose", "forward", "forward_last"]

Three = tuple[Tensor, Tensor, Tensor]

choose = functools.partial(choice.choose, __name__)


def forward(
    q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, *, impl: Name = "auto"
) -> Tensor:
    """The output of every token, T x H x V."""
    body, _ = choose(impl, q_THA.device)
    out_THV: Tensor = body.forward(q_THA, k_THA, v_THV, offsets_B1, mask)
    return out_THV


def backward(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    *, into: Three | None = None, deterministic: bool | None = None, impl: Name = "auto",
) -> Three:  # fmt: skip
    """Gradients of q, k and v; `deterministic`: the same bits every time (None: torch's own setting)."""
    body, _ = choose(impl, q_THA.device)
    gradients: Three = body.backward(
        grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, into=into, deterministic=deterministic
    )
    return gradients


def forward_last(
    q_BHA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, *, impl: Name = "auto"
) -> Tensor:
    """The output of the last token of every row, B x H x V, from its queries alone. No row may be empty."""
    body, _ = choose(impl, q_BHA.device)
    out_BHV: Tensor = body.forward_last(q_BHA, k_THA, v_THV, offsets_B1, mask)
    return out_BHV


def backward_last(
    grad_BHV: Tensor, q_BHA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    *, into: Three | None = None, impl: Name = "auto",
) -> Three:  # fmt: skip
    """Gradients of the last queries, B x H x A, and of all keys and values."""
    body, _ = choose(impl, q_BHA.device)
    gradients: Three = body.backward_last(grad_BHV, q_BHA, k_THA, v_THV, offsets_B1, mask, into=into)
    return gradients


def attention(
    q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, impl: Name = "auto"
) -> Tensor:
    """The output of every token, differentiable; the backward pass recomputes the scores."""
    body, _ = choose(impl, q_THA.device)
    out_THV: Tensor = _Attention.apply(q_THA, k_THA, v_THV, offsets_B1, mask, body)  # type: ignore[no-untyped-call]
    return out_THV


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, body: ModuleType
    ) -> Tensor:
        ctx.save_for_backward(q_THA, k_THA, v_THV, offsets_B1)
        ctx.mask, ctx.body = mask, body
        out_THV: Tensor = body.forward(q_THA, k_THA, v_THV, offsets_B1, mask)
        return out_THV

    @staticmethod
    def backward(ctx: Any, grad_THV: Tensor) -> Any:
        q_THA, k_THA, v_THV, offsets_B1 = ctx.saved_tensors
        return (*ctx.body.backward(grad_THV, q_THA, k_THA, v_THV, offsets_B1, ctx.mask), None, None, None)
