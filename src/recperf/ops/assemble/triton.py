"""Assembly of tokens on a GPU.

A program has a few neighbouring positions and goes through some of the rows: it reads their position vectors once, and
backward it adds up what all those rows give to them, without sorting. Shared rows and tables mostly come from the
cache, so that tokens are written about as fast as memory takes them. Backward, the gradient is read three times: by
position (which also applies the dropout), by row, by age and action.

Shapes: B rows, C context tokens a row, T tokens, S positions, U shared rows, K actions, P positions, Q ages, D width, G
groups of rows, L positions that occur.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dropout import NO_DROPOUT, Dropout
from ..dropout.triton import arguments, factors, row_words
from ..lookup.triton import segment_sum, tile
from ..operators import operator
from . import AssemblyPlan, shared_sums

UNSPECIALIZED = ["first", "second", "threshold"]
TALL = 4
"""Maximum positions of a program: with twice as many, at width 512, registers leave room for half the programs."""
PROGRAMS = 8192
"""Aimed-for number of programs: a few for every slot of the largest device."""


@triton.jit
def positions_at(block, context, ROWS: tl.constexpr, OPENING: tl.constexpr):
    """The positions of a block, including those beyond the table; the first OPENING blocks are the context."""
    lanes = tl.arange(0, ROWS).to(tl.int64)
    return lanes + tl.where(block < OPENING, block * ROWS, (block - OPENING) * ROWS + context)


@triton.jit
def tokens_at(begin, end, position, block, context, OPENING: tl.constexpr):
    """The tokens of a row at these positions, and a mask of those that exist."""
    at_start = block < OPENING
    token = tl.where(at_start, begin + position, end - 1 - (position - context))
    there = tl.where(at_start, (position < context) & (token < end), token >= begin + context)
    return token, there


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
            value_in = tl.load(context + at, mask=mask, other=0.0).to(tl.float32)
        else:
            nth = token - (row + 1) * C
            source = tl.load(source_S + nth, mask=there, other=0).to(tl.int64)
            action = tl.load(action_S + nth, mask=there, other=0).to(tl.int64)
            value_in = tl.load(rows + source[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            value_in += tl.load(actions + action[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        value += value_in * gain + at_position
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
        value_in = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        if DROP:
            a, b = row_words(token, numbers, there, first, second, LISTED)
            value_in *= factors(columns, a, b, threshold, scale)
            tl.store(undropped + place, value_in.to(undropped.dtype.element_ty), mask=mask)
        total += value_in
        if block < OPENING:
            at = (row * C + position)[:, None] * D + columns[None, :]
            tl.store(dcontext + at, (value_in * gain).to(dcontext.dtype.element_ty), mask=mask)
    # The last block of context may reach into the positions after it, which are another block's.
    own = (position < tl.where(block < OPENING, C, slots))[:, None] & wide
    place = (tl.program_id(1).to(tl.int64) * slots + position)[:, None] * D + columns[None, :]
    tl.store(sums + place, total, mask=own)


class Cut(NamedTuple):
    """How positions and rows are divided between programs."""

    slots: int
    """Positions that occur, including those beyond the end of the table."""
    tall: int
    width: int
    opening: int
    """Blocks of positions for the context tokens."""
    blocks: int
    groups: int
    group: int


def cut(dim: int, tokens: int, rows: int, *, context: int, longest: int, partial: bool) -> Cut:
    """How to divide the work. With `partial` every group writes a sum: at most a quarter as many as tokens."""
    tall, width = tile(dim, TALL)
    slots = max(longest, context)
    opening = triton.cdiv(context, tall)
    blocks = opening + triton.cdiv(slots - context, tall)
    groups = min(rows, triton.cdiv(PROGRAMS, max(1, blocks)))
    if partial:
        groups = max(1, min(groups, tokens // (4 * max(1, slots))))
    group = triton.cdiv(rows, max(1, groups))
    return Cut(slots, tall, width, opening, blocks, triton.cdiv(rows, group), group)


@operator("assemble_forward")
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


@operator("assemble_backward")
def backward(
    grad_TD: Tensor, plan: AssemblyPlan, *, positions: int, scale: float, dropout: Dropout = NO_DROPOUT
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


def joined(sums_GLD: Tensor, positions: int) -> Tensor:
    """The gradient of the position table; its last row sums all positions from there on."""
    slots, dim = sums_GLD.shape[1:]
    out_PD = torch.zeros(positions, dim, device=sums_GLD.device)
    plain = min(slots, positions - 1)
    torch.sum(sums_GLD[:, :plain], 0, out=out_PD[:plain])
    if slots > plain:
        out_PD[plain] = sums_GLD[:, plain:].sum((0, 1))
    return out_PD
