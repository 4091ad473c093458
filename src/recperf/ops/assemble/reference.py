"""Tokens from shared rows, actions, positions and ages, in plain torch.

Shapes: B rows, C context tokens a row, T tokens, S positions, U rows taken, K actions, P positions' table, Q ages, D
width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dropout import Dropout
from ..dropout.reference import factors
from ..jagged.reference import concat, split
from ..lookup.reference import segment_sum
from ..position_time.reference import bucket_sums, positions_of
from .plan import Plan, shared_sums


def _edges(plan: Plan) -> tuple[Tensor, Tensor]:
    """Where rows begin among the tokens of context and among the positions."""
    context_B1 = plan.context * torch.arange(plan.offsets_B1.numel(), device=plan.offsets_B1.device)
    return context_B1, plan.offsets_B1 - context_B1


def forward(
    context_BCD: Tensor,
    rows_UD: Tensor,
    actions_KD: Tensor,
    position_weight_PD: Tensor,
    time_weight_QD: Tensor,
    plan: Plan,
    *,
    scale: float,
    dropout: Dropout,
) -> Tensor:
    wide = torch.promote_types(rows_UD.dtype, torch.float32)
    context_B1, positions_B1 = _edges(plan)
    sequence_SD = rows_UD.to(wide)[plan.source_S] + actions_KD.to(wide)[plan.action_S]
    x_TD = concat(context_BCD.to(wide).flatten(0, 1), context_B1, sequence_SD, positions_B1)
    position_T = positions_of(plan.offsets_B1, plan.tokens, positions=position_weight_PD.shape[0], context=plan.context)
    x_TD = x_TD * scale + position_weight_PD.to(wide)[position_T] + time_weight_QD.to(wide)[plan.age_T]
    return (x_TD * factors(dropout, x_TD)).to(rows_UD.dtype)


def backward(
    grad_TD: Tensor, plan: Plan, *, positions: int, scale: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kind = grad_TD.dtype
    grad_TD = grad_TD.to(torch.promote_types(kind, torch.float32))
    grad_TD = grad_TD * factors(dropout, grad_TD)
    context_B1, positions_B1 = _edges(plan)
    rows = plan.offsets_B1.numel() - 1
    context_SD, _ = split(grad_TD, context_B1, positions_B1, rows * plan.context)
    position_T = positions_of(plan.offsets_B1, plan.tokens, positions=positions, context=plan.context)
    rows_UD, actions_KD, time_QD = shared_sums(grad_TD, plan, scale, segment_sum)
    return (
        (context_SD * scale).to(kind).view(rows, plan.context, grad_TD.shape[1]),
        rows_UD,
        actions_KD,
        bucket_sums(grad_TD, position_T, positions),
        time_QD,
    )
