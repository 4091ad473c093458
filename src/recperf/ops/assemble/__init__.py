"""The tokens of a batch in one pass, from rows that many positions share: `reference` and `triton`.

how = plan(offsets_B1, times_T, ids.inverse_N, ids.order_N, ids.starts_U1, action_S, actions=9, ages=2049, context=8,
           longest=...)                                                                 # outside the step
out_TD = assemble(context_BCD, rows_UD, actions_KD, position_weight_PD, time_weight_QD, how, scale=..., dropout=...)

A position is `scale * (row + action) + position + age`, a token of context `scale * context + position + age`; dropout
follows. No tensor is written in between.

Shapes: B rows, C context tokens a row, T tokens, S positions, U rows taken, K actions, P positions, Q ages, D width.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from .. import choice
from ..choice import Name
from ..dropout import Dropout
from .plan import Plan, plan

__all__ = ["Name", "Plan", "assemble", "backward", "choose", "forward", "plan"]

NONE = Dropout(0.0)

choose = functools.partial(choice.choose, __name__)


def forward(
    context_BCD: Tensor,
    rows_UD: Tensor,
    actions_KD: Tensor,
    position_weight_PD: Tensor,
    time_weight_QD: Tensor,
    plan: Plan,
    *,
    scale: float,
    dropout: Dropout = NONE,
    impl: Name = "auto",
) -> Tensor:
    """In the type of the rows."""
    _check(context_BCD, rows_UD, actions_KD, position_weight_PD, time_weight_QD, plan)
    body, _ = choose(impl, rows_UD.device)
    parts = (context_BCD, rows_UD, actions_KD, position_weight_PD, time_weight_QD)
    return cast(Tensor, body.forward(*parts, plan, scale=scale, dropout=dropout))


def backward(
    grad_TD: Tensor, plan: Plan, *, positions: int, scale: float, dropout: Dropout = NONE, impl: Name = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of context (in the type of the gradient), rows, actions, positions and ages (at least float32), in this order."""
    body, _ = choose(impl, grad_TD.device)
    found = body.backward(grad_TD, plan, positions=positions, scale=scale, dropout=dropout)
    return cast(tuple[Tensor, Tensor, Tensor, Tensor, Tensor], found)


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, context: Tensor, rows: Tensor, actions: Tensor, position: Tensor, time: Tensor, plan: Plan, how: Any
    ) -> Tensor:
        parts = (context, rows, actions, position, time)
        ctx.plan, ctx.how, ctx.positions = plan, how, position.shape[0]
        ctx.kinds = [part.dtype for part in parts]
        return forward(*parts, plan, **how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = backward(grads[0], ctx.plan, positions=ctx.positions, **ctx.how)
        return *(part.to(kind) for part, kind in zip(found, ctx.kinds)), None, None


def assemble(
    context_BCD: Tensor,
    rows_UD: Tensor,
    actions_KD: Tensor,
    position_weight_PD: Tensor,
    time_weight_QD: Tensor,
    plan: Plan,
    *,
    scale: float,
    dropout: Dropout = NONE,
    impl: Name = "auto",
) -> Tensor:
    """`forward`, differentiable."""
    parts = (context_BCD, rows_UD, actions_KD, position_weight_PD, time_weight_QD)
    how = {"scale": scale, "dropout": dropout, "impl": impl}
    out_TD: Tensor = _Assemble.apply(*parts, plan, how)  # type: ignore[no-untyped-call]
    return out_TD


def _check(context: Tensor, rows: Tensor, actions: Tensor, position: Tensor, time: Tensor, plan: Plan) -> None:
    """A kernel that is handed a smaller table reads beyond its end."""
    wanted = (
        (plan.offsets_B1.numel() - 1, plan.context), plan.source_starts_U1.numel() - 1, plan.actions, plan.ages
    )  # fmt: skip
    given = (tuple(context.shape[:2]), rows.shape[0], actions.shape[0], time.shape[0])
    if wanted != given:
        raise ValueError(f"(rows and context, rows taken, actions, ages): {wanted} planned, {given} given")
    if plan.context >= position.shape[0]:
        raise ValueError(f"context {plan.context}, of {position.shape[0]} positions: one must be left after it")
