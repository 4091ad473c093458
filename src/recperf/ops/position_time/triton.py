"""Tokens scaled, with a learned vector for their position and one for their age, on a GPU.

A program has a few neighbouring positions and goes through some of the rows: it reads their position vectors once, and
backward it adds up what all those rows give to them, without sorting. Ages are sorted, since any token may have any.

Shapes: B rows, T tokens of all rows, D width, P positions, Q ages, L positions that occur, G groups of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lookup.triton import segment_sum, tile
from .reference import SHORTEST, UNIT, grouped

TALL = 4
"""Positions a program has at most: with twice as many, at width 512, registers leave room for half the programs."""
PROGRAMS = 8192
"""About as many are wanted: a few for every place on the largest device."""


@triton.jit
def _age_of(times, offsets, ages_T, ages, shortest, unit, ROWS: tl.constexpr, SHARES: tl.constexpr):
    row = tl.program_id(0)
    begin, end = tl.load(offsets + row).to(tl.int64), tl.load(offsets + row + 1).to(tl.int64)
    if begin < end:
        now = tl.load(times + end - 1)
        for first in range(begin + tl.program_id(1) * ROWS, end, ROWS * SHARES):
            at = first + tl.arange(0, ROWS)
            seconds = (now - tl.load(times + at, mask=at < end, other=0)).to(tl.float32)
            # Rounded as the standard says: at the edge of a bucket the last bit decides.
            root = tl.sqrt_rn(tl.div_rn(tl.maximum(seconds, shortest), unit))
            age = tl.minimum(root.to(tl.int32), ages - 1)
            tl.store(ages_T + at, age.to(ages_T.dtype.element_ty), mask=at < end)


def age_of(offsets_B1: Tensor, times_T: Tensor, ages: int) -> Tensor:
    """The row of the time table that every token takes; in two bytes where they are enough, for the sort."""
    kind = torch.int16 if ages < 1 << 15 else torch.int32
    age_T = torch.empty(times_T.shape, dtype=kind, device=times_T.device)
    rows, tokens = offsets_B1.numel() - 1, times_T.numel()
    if tokens:
        shares = max(1, min(64, triton.next_power_of_2(triton.cdiv(tokens, rows * 1024))))
        _age_of[(rows, shares)](times_T, offsets_B1, age_T, ages, SHORTEST, UNIT, ROWS=256, SHARES=shares, num_warps=4)
    return age_T


@triton.jit
def positions_at(block, context, ROWS: tl.constexpr, OPENING: tl.constexpr):
    """The positions of a block, before the table's end is respected: the first OPENING blocks are the context's."""
    lanes = tl.arange(0, ROWS).to(tl.int64)
    return lanes + tl.where(block < OPENING, block * ROWS, (block - OPENING) * ROWS + context)


@triton.jit
def tokens_at(begin, end, position, block, context, OPENING: tl.constexpr):
    """The tokens of a row that are at these positions, and whether there are such."""
    at_start = block < OPENING
    token = tl.where(at_start, begin + position, end - 1 - (position - context))
    there = tl.where(at_start, (position < context) & (token < end), token >= begin + context)
    return token, there


@triton.jit
def _forward(
    x, offsets, age_T, position_weight, time_weight, out, D, B, positions, context, scale, group,
    OPENING: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    wide = (columns < D)[None, :]
    position = positions_at(block, context, ROWS, OPENING)
    place = tl.minimum(position, positions - 1)[:, None] * D + columns[None, :]
    at_position = tl.load(position_weight + place, mask=wide, other=0.0).to(tl.float32)
    first = tl.program_id(1) * group
    for row in range(first, tl.minimum(first + group, B)):
        begin, end = tl.load(offsets + row).to(tl.int64), tl.load(offsets + row + 1).to(tl.int64)
        token, inside = tokens_at(begin, end, position, block, context, OPENING)
        age = tl.load(age_T + token, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & wide
        given = tl.load(x + token[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        aged = tl.load(time_weight + age[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        value = given * scale + at_position + aged
        tl.store(out + token[:, None] * D + columns[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad, offsets, dx, sums, D, B, context, slots, scale, group,
    OPENING: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    wide = (columns < D)[None, :]
    position = positions_at(block, context, ROWS, OPENING)
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    first = tl.program_id(1) * group
    for row in range(first, tl.minimum(first + group, B)):
        begin, end = tl.load(offsets + row).to(tl.int64), tl.load(offsets + row + 1).to(tl.int64)
        token, inside = tokens_at(begin, end, position, block, context, OPENING)
        mask = inside[:, None] & wide
        given = tl.load(grad + token[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total += given
        scaled = (given * scale).to(dx.dtype.element_ty)
        tl.store(dx + token[:, None] * D + columns[None, :], scaled, mask=mask)
    # The last block of context may reach into the positions after it, which are another block's.
    own = (position < tl.where(block < OPENING, context, slots))[:, None] & wide
    place = (tl.program_id(1).to(tl.int64) * slots + position)[:, None] * D + columns[None, :]
    tl.store(sums + place, total, mask=own)


class Cut(NamedTuple):
    """How positions and rows are shared among programs."""

    slots: int
    """Positions that occur, before the table's end is respected."""
    tall: int
    width: int
    opening: int
    """Blocks of positions for the tokens of context."""
    blocks: int
    groups: int
    group: int


def cut(dim: int, tokens: int, rows: int, *, context: int, longest: int, partial: bool) -> Cut:
    """With `partial`, every group leaves a sum: not more of them than a quarter of the tokens."""
    tall, width = tile(dim, TALL)
    slots = max(longest, context)
    opening = triton.cdiv(context, tall)
    blocks = opening + triton.cdiv(slots - context, tall)
    groups = min(rows, triton.cdiv(PROGRAMS, max(1, blocks)))
    if partial:
        groups = max(1, min(groups, tokens // (4 * max(1, slots))))
    group = triton.cdiv(rows, max(1, groups))
    return Cut(slots, tall, width, opening, blocks, triton.cdiv(rows, group), group)


def forward(
    x_TD: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor,
    position_weight_PD: Tensor,
    time_weight_QD: Tensor,
    *,
    scale: float,
    context: int,
    longest: int,
) -> Tensor:
    x_TD, (tokens, dim), rows = x_TD.contiguous(), x_TD.shape, offsets_B1.numel() - 1
    out_TD = torch.empty_like(x_TD)
    if not out_TD.numel():
        return out_TD
    age_T = age_of(offsets_B1, times_T.contiguous(), time_weight_QD.shape[0])
    to = cut(dim, tokens, rows, context=context, longest=longest, partial=False)
    _forward[(to.blocks, to.groups)](
        x_TD, offsets_B1, age_T, position_weight_PD.contiguous(), time_weight_QD.contiguous(), out_TD, dim, rows,
        position_weight_PD.shape[0], context, scale, to.group,
        OPENING=to.opening, ROWS=to.tall, WIDTH=to.width, num_warps=4,
    )  # fmt: skip
    return out_TD


def backward(
    grad_TD: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor,
    *,
    positions: int,
    ages: int,
    scale: float,
    context: int,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_TD, (tokens, dim), rows = grad_TD.contiguous(), grad_TD.shape, offsets_B1.numel() - 1
    dx_TD = torch.empty_like(grad_TD)
    if not grad_TD.numel():
        return dx_TD, dx_TD.new_zeros(positions, dim).float(), dx_TD.new_zeros(ages, dim).float()
    to = cut(dim, tokens, rows, context=context, longest=longest, partial=True)
    sums_GLD = torch.empty(to.groups, to.slots, dim, device=grad_TD.device)
    _backward[(to.blocks, to.groups)](
        grad_TD, offsets_B1, dx_TD, sums_GLD, dim, rows, context, to.slots, scale, to.group,
        OPENING=to.opening, ROWS=to.tall, WIDTH=to.width, num_warps=4,
    )  # fmt: skip
    age_T = age_of(offsets_B1, times_T.contiguous(), ages)
    return dx_TD, joined(sums_GLD, positions), segment_sum(grad_TD, *grouped(age_T, ages))


def joined(sums_GLD: Tensor, positions: int) -> Tensor:
    """The gradient of the position table, whose last row has all positions from there on."""
    slots, dim = sums_GLD.shape[1:]
    out_PD = torch.zeros(positions, dim, device=sums_GLD.device)
    plain = min(slots, positions - 1)
    torch.sum(sums_GLD[:, :plain], 0, out=out_PD[:plain])
    if slots > plain:
        out_PD[plain] = sums_GLD[:, plain:].sum((0, 1))
    return out_PD
