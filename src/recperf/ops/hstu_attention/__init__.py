"""HSTU attention over packed rows of different lengths, SiLU(alpha q.k) / length under a mask: `reference` (plain
torch, any device), `native` (C, a CPU; for rows of up to 512 tokens) and `triton` (a GPU).

The mask of the models is plainly causal. Masks with targets, a window or a context are always computed by `reference`.

`attention` is differentiable; the others are its forward and backward pass, for callers with an own autograd function:
out_THV = forward(q_THA, k_THA, v_THV, offsets_B1, mask)
dq_THA, dk_THA, dv_THV = backward(grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, into=None, sums=None,
                                  deterministic=None)
Each body also has `forward_last` and `backward_last`, for the last token of every row.

q, k, v and the tensors of `into` may be views with any stride between tokens, as pieces of one wider buffer are; the
numbers of a head lie together. Row b holds the tokens offsets_B1[b] .. offsets_B1[b + 1], and every token has a row.

Shapes: B rows, T tokens of all rows, H heads, A width of q and k, V width of v.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import choice
from ..choice import Name
from .reference import Mask

__all__ = ["Mask", "attention", "backward", "choose", "forward"]

choose = functools.partial(choice.choose, __name__)
forward: Callable[..., Tensor] = choice.dispatch(__name__, "forward")
backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = choice.dispatch(__name__, "backward")


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
