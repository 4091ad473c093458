"""Assembles the tokens of a batch in one pass from rows that many positions share: `reference` and `triton`.

recipe = plan(offsets_B1, times_T, ids.inverse_N, ids.order_N, ids.starts_U1, action_S, actions=9, ages=2049, context=8,
           longest=...)                                                                 # outside the step
out_TD = assemble(context_BCD, rows_UD, actions_KD, position_weight_PD, time_weight_QD, recipe, scale=..., dropout=...)

A position is `scale * (row + action) + position + age`, a token of context `scale * context + position + age`; dropout
follows. No tensor is written in between.

Shapes: B rows, C context tokens a row, T tokens, S positions, U shared rows, K actions, P positions, Q ages, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from .. import choice
from ..choice import Name
from ..dropout import Dropout
from ..dropout.rule import NO_DROPOUT
from .plan import Plan, plan

__all__ = ["Plan", "assemble", "backward", "choose", "forward", "plan"]

choose = functools.partial(choice.choose, __name__)
forward: Callable[..., Tensor] = choice.dispatch(__name__, "forward")
backward: Callable[..., tuple[Tensor, ...]] = choice.dispatch(__name__, "backward")
"""Gradients of context (in the type of the gradient), rows, actions, positions and ages (at least float32)."""


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, options: dict[str, Any], *parts: Tensor) -> Tensor:
        ctx.plan, ctx.options, ctx.positions = plan, options, parts[3].shape[0]
        ctx.dtypes = [part.dtype for part in parts]
        return forward(*parts, plan, **options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = backward(grads[0], ctx.plan, positions=ctx.positions, **ctx.options)
        return None, None, *(part.to(dtype) for part, dtype in zip(gradients, ctx.dtypes))


def assemble(
    context_BCD: Tensor,
    rows_UD: Tensor,
    actions_KD: Tensor,
    position_weight_PD: Tensor,
    time_weight_QD: Tensor,
    plan: Plan,
    *,
    scale: float,
    dropout: Dropout = NO_DROPOUT,
    impl: Name = "auto",
) -> Tensor:
    """The tokens, in the type of the rows; differentiable."""
    parts = (context_BCD, rows_UD, actions_KD, position_weight_PD, time_weight_QD)
    options = {"scale": scale, "dropout": dropout, "impl": impl}
    _check(*parts, plan)
    out_TD: Tensor = _Assemble.apply(plan, options, *parts)  # type: ignore[no-untyped-call]
    return out_TD


def _check(context: Tensor, rows: Tensor, actions: Tensor, position: Tensor, time: Tensor, plan: Plan) -> None:
    """Refuse tables smaller than planned: a kernel would read beyond their end."""
    planned = (
        (plan.offsets_B1.numel() - 1, plan.context), plan.source_starts_U1.numel() - 1, plan.actions, plan.ages
    )  # fmt: skip
    actual = (tuple(context.shape[:2]), rows.shape[0], actions.shape[0], time.shape[0])
    if planned != actual:
        raise ArgumentError(f"(rows and context, shared rows, actions, ages) are {actual}; the plan is for {planned}")
    if plan.context >= position.shape[0]:
        raise ArgumentError(f"the position table has {position.shape[0]} rows; it needs more than {plan.context}")
