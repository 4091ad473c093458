"""HSTU attention over packed rows of different lengths, SiLU(alpha q.k + bias) / length under a mask: `reference`
(plain torch, any device), `native` (C, a CPU; for rows of up to 512 tokens) and `triton` (a GPU).

The mask of the models is plainly causal. Masks with targets, a window or a context are always computed by `reference`,
and take no bias.

`attention` is differentiable; the others are its forward and backward pass, for callers with an own autograd function:
out_THV = forward(q_THA, k_THA, v_THV, offsets_B1, mask, bias=None)
dq_THA, dk_THA, dv_THV = backward(grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, into=None, sums=None,
                                  deterministic=None)
Each body also has `backward_biased`, which returns the gradients of positions_P and buckets_K of a bias too, and
`forward_last` and `backward_last`, for the last token of every row.

q, k, v and the tensors of `into` may be views with any stride between tokens, as pieces of one wider buffer are; the
numbers of a head lie together. Row b holds the tokens offsets_B1[b] .. offsets_B1[b + 1], and every token has a row.

Shapes: B rows, T tokens of all rows, H heads, A width of q and k, V width of v, P distances and K time
buckets of a bias.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import choice
from ..choice import Name
from .reference import Mask, RelativeBias

__all__ = ["Mask", "RelativeBias", "attention", "backward", "choose", "forward"]

choose = functools.partial(choice.choose, __name__)
forward: Callable[..., Tensor] = choice.dispatch(__name__, "forward")
backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = choice.dispatch(__name__, "backward")


def attention(
    q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, impl: Name = "auto",
    bias: RelativeBias | None = None,
) -> Tensor:  # fmt: skip
    """The output of every token, differentiable in q, k, v and what the bias has learned; the backward pass recomputes
    the scores."""
    body, _ = choose(impl, q_THA.device)
    if not torch.is_grad_enabled():
        plain_THV: Tensor = body.forward(q_THA, k_THA, v_THV, offsets_B1, mask, bias)
        return plain_THV
    learned = () if bias is None else (bias.positions_P, bias.buckets_K)
    inputs = (mask, bias, body), q_THA, k_THA, v_THV, offsets_B1, *learned
    # What `apply` adds for torch.func takes half as long as all the rest of it.
    applied = _Attention.apply if torch._C._are_functorch_transforms_active() else _apply
    out_THV: Tensor = applied(*inputs)
    return out_THV


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[Mask, RelativeBias | None, ModuleType], *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.call = call
        mask, bias, body = call
        out_THV: Tensor = body.forward(*inputs[:4], mask, bias)
        return out_THV

    @staticmethod
    def backward(ctx: Any, grad_THV: Tensor) -> Any:
        q_THA, k_THA, v_THV, offsets_B1, *learned = ctx.saved_tensors
        mask, bias, body = ctx.call
        inputs = grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask
        if bias is None:
            return None, *body.backward(*inputs), None
        bias = replace(bias, positions_P=learned[0], buckets_K=learned[1])
        dq_THA, dk_THA, dv_THV, *dlearned = body.backward_biased(*inputs, bias)
        return None, dq_THA, dk_THA, dv_THV, None, *dlearned


_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Attention).apply
