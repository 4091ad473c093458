"""Tokens from shared rows, actions, positions and ages, on a GPU.

Forward, programs have positions as in ops/position_time: what they read of the shared rows and of the tables mostly
comes from the cache, so that the tokens are written about as fast as memory takes them. Backward, the gradient is read
three times: by position (which also undoes the dropout), by row, by age and action.

Shapes: B rows, C context tokens a row, T tokens, S positions, U rows taken, K actions, P positions, Q ages, D width, G
groups of rows, L positions that occur.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dropout import Dropout
from ..dropout.triton import arguments, factors, row_words
from ..lookup.triton import segment_sum
from ..position_time.triton import cut, joined, positions_at, tokens_at
from .plan import Plan, shared_sums

UNSPECIALIZED = ["first", "second", "threshold"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _forward(
    context, rows, actions, position_weight, time_weight, offsets, source_S, action_S, age_T, out,
    D, B, C, positions, gain, group, numbers, first, second, threshold, scale,
    OPENING: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DROP: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    wide = (columns < D)[None, :]
    position = positions_at(block, C, ROWS, OPENING)
    place = tl.minimum(position, positions - 1)[:, None] * D + columns[None, :]
    at_position = tl.load(position_weight + place, mask=wide, other=0.0).to(tl.float32)
    begins = tl.program_id(1) * group
    for row in range(begins, tl.minimum(begins + group, B)):
        begin, end = tl.load(offsets + row).to(tl.int64), tl.load(offsets + row + 1).to(tl.int64)
        token, there = tokens_at(begin, end, position, block, C, OPENING)
        mask = there[:, None] & wide
        age = tl.load(age_T + token, mask=there, other=0).to(tl.int64)
        value = tl.load(time_weight + age[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if block < OPENING:
            at = (row * C + position)[:, None] * D + columns[None, :]
            given = tl.load(context + at, mask=mask, other=0.0).to(tl.float32)
        else:
            nth = token - (row + 1) * C
            source = tl.load(source_S + nth, mask=there, other=0).to(tl.int64)
            action = tl.load(action_S + nth, mask=there, other=0).to(tl.int64)
            given = tl.load(rows + source[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            given += tl.load(actions + action[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        value += given * gain + at_position
        if DROP:
            a, b = row_words(token, numbers, there, first, second, LISTED)
            value *= factors(columns, a, b, threshold, scale)
        tl.store(out + token[:, None] * D + columns[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _backward(
    grad, offsets, undropped, dcontext, sums, D, B, C, slots, gain, group, numbers, first, second, threshold, scale,
    OPENING: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DROP: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    wide = (columns < D)[None, :]
    position = positions_at(block, C, ROWS, OPENING)
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    begins = tl.program_id(1) * group
    for row in range(begins, tl.minimum(begins + group, B)):
        begin, end = tl.load(offsets + row).to(tl.int64), tl.load(offsets + row + 1).to(tl.int64)
        token, there = tokens_at(begin, end, position, block, C, OPENING)
        mask = there[:, None] & wide
        place = token[:, None] * D + columns[None, :]
        given = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        if DROP:
            a, b = row_words(token, numbers, there, first, second, LISTED)
            given *= factors(columns, a, b, threshold, scale)
            tl.store(undropped + place, given.to(undropped.dtype.element_ty), mask=mask)
        total += given
        if block < OPENING:
            at = (row * C + position)[:, None] * D + columns[None, :]
            tl.store(dcontext + at, (given * gain).to(dcontext.dtype.element_ty), mask=mask)
    # The last block of context may reach into the positions after it, which are another block's.
    own = (position < tl.where(block < OPENING, C, slots))[:, None] & wide
    place = (tl.program_id(1).to(tl.int64) * slots + position)[:, None] * D + columns[None, :]
    tl.store(sums + place, total, mask=own)


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
    dim, rows = rows_UD.shape[1], plan.offsets_B1.numel() - 1
    out_TD = torch.empty(plan.tokens, dim, dtype=rows_UD.dtype, device=rows_UD.device)
    if not out_TD.numel():
        return out_TD
    to = cut(dim, plan.tokens, rows, context=plan.context, longest=plan.longest, partial=False)
    tables = (context_BCD, rows_UD, actions_KD, position_weight_PD, time_weight_QD)
    _forward[(to.blocks, to.groups)](
        *(table.contiguous() for table in tables), plan.offsets_B1, plan.source_S, plan.action_S, plan.age_T, out_TD,
        dim, rows, plan.context, position_weight_PD.shape[0], scale, to.group,
        OPENING=to.opening, ROWS=to.tall, WIDTH=to.width, num_warps=4, **arguments(dropout),
    )  # fmt: skip
    return out_TD


def backward(
    grad_TD: Tensor, plan: Plan, *, positions: int, scale: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_TD, dim, rows = grad_TD.contiguous(), grad_TD.shape[1], plan.offsets_B1.numel() - 1
    context_BCD = torch.empty(rows, plan.context, dim, dtype=grad_TD.dtype, device=grad_TD.device)
    position_PD = torch.zeros(positions, dim, device=grad_TD.device)
    if grad_TD.numel():
        to = cut(dim, plan.tokens, rows, context=plan.context, longest=plan.longest, partial=True)
        undropped_TD = torch.empty_like(grad_TD) if dropout.rate else grad_TD
        sums_GLD = torch.empty(to.groups, to.slots, dim, device=grad_TD.device)
        _backward[(to.blocks, to.groups)](
            grad_TD, plan.offsets_B1, undropped_TD, context_BCD, sums_GLD, dim, rows, plan.context, to.slots, scale,
            to.group, OPENING=to.opening, ROWS=to.tall, WIDTH=to.width, num_warps=4, **arguments(dropout),
        )  # fmt: skip
        grad_TD, position_PD = undropped_TD, joined(sums_GLD, positions)
    rows_UD, actions_KD, time_QD = shared_sums(grad_TD, plan, scale, segment_sum)
    return context_BCD, rows_UD, actions_KD, position_PD, time_QD
