"""Assembly of tokens in plain torch.

Shapes: B rows, C context tokens a row, T tokens, S positions, U shared rows, K actions, P positions, Q ages, D
width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dropout import NO_DROPOUT, Dropout, factors
from ..lookup.reference import segment_sum
from . import AssemblyPlan, grouped, row_of_token, shared_sums


def places(plan: AssemblyPlan, positions: int) -> tuple[Tensor, Tensor]:
    """Which tokens are context, and the row of the position table that each token reads.

    The context's tokens count from the start of their row, the others from its end, after the context.
    """
    row_T = row_of_token(plan.offsets_B1, plan.tokens)
    token_T = torch.arange(plan.tokens, device=plan.offsets_B1.device)
    from_start_T, from_end_T = token_T - plan.offsets_B1[row_T], plan.offsets_B1[1:][row_T] - 1 - token_T
    is_context_T = from_start_T < plan.context
    return is_context_T, torch.where(is_context_T, from_start_T, from_end_T + plan.context).clamp(max=positions - 1)


def forward(
    context_BCD: Tensor,
    rows_UD: Tensor,
    actions_KD: Tensor,
    position_weight_PD: Tensor,
    time_weight_QD: Tensor,
    plan: AssemblyPlan,
    *,
    scale: float,
    dropout: Dropout = NO_DROPOUT,
) -> Tensor:
    wide = torch.promote_types(rows_UD.dtype, torch.float32)
    is_context_T, position_T = places(plan, position_weight_PD.shape[0])
    x_TD = rows_UD.new_empty(plan.tokens, rows_UD.shape[1], dtype=wide)
    x_TD[is_context_T] = context_BCD.to(wide).flatten(0, 1)
    x_TD[~is_context_T] = rows_UD.to(wide)[plan.source_S] + actions_KD.to(wide)[plan.action_S]
    x_TD = x_TD * scale + position_weight_PD.to(wide)[position_T] + time_weight_QD.to(wide)[plan.age_T]
    return (x_TD * factors(dropout, x_TD)).to(rows_UD.dtype)


def backward(
    grad_TD: Tensor, plan: AssemblyPlan, *, positions: int, scale: float, dropout: Dropout = NO_DROPOUT
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kind = grad_TD.dtype
    grad_TD = grad_TD.to(torch.promote_types(kind, torch.float32))
    grad_TD = grad_TD * factors(dropout, grad_TD)
    is_context_T, position_T = places(plan, positions)
    rows_UD, actions_KD, time_QD = shared_sums(grad_TD, plan, scale, segment_sum)
    return (
        (grad_TD[is_context_T] * scale).to(kind).view(plan.offsets_B1.numel() - 1, plan.context, grad_TD.shape[1]),
        rows_UD,
        actions_KD,
        segment_sum(grad_TD, *grouped(position_T, positions)),
        time_QD,
    )
