"""Packed and padded heads on a GPU: every number is read once, rotated on the way and written once.

Shapes: see the package; a program has some positions of one head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator
from .reference import BASE

if TYPE_CHECKING:
    from . import Sequences

TILE = 2048
"""Elements that a program of four warps holds."""


def tile(width: int) -> tuple[int, int]:
    """Positions and columns of a program."""
    columns = triton.next_power_of_2(width)
    return max(1, min(128, TILE // columns)), columns


@triton.jit
def _loaded(at, column, position, inside, half, octaves, sign):
    """The numbers of a head, turned by their positions; sign 0: as they are."""
    value = tl.load(at + column[None, :], mask=inside, other=0.0)
    if sign != 0:
        first = column < half
        pair = tl.where(first, column + half, column - half)
        turning = column < 2 * half
        other = tl.load(at + pair[None, :], mask=inside & turning[None, :], other=0.0).to(tl.float32)
        point = tl.where(first, column, pair).to(tl.float32)
        angle = position.to(tl.float32)[:, None] * tl.exp2(point * octaves)[None, :]
        along = tl.where(first, -1.0, 1.0) * sign
        turned = value.to(tl.float32) * tl.cos(angle) + other * along[None, :] * tl.sin(angle)
        value = tl.where(turning[None, :], turned, value.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _pad(
    packed, out, offsets, places, L, G, A, turned, half, octaves, stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    sequence, position = place // L, place % L
    begin = tl.load(offsets + sequence, mask=place < places, other=0)
    end = tl.load(offsets + sequence + 1, mask=place < places, other=0)
    inside = ((begin + position < end) & (place < places))[:, None] & (column < A)[None, :]
    at = packed + (begin + position)[:, None] * stride + head * A
    sign = tl.where(head < turned, 1, 0)
    value = _loaded(at, column, position, inside, half, octaves, sign)
    to = out + (place[:, None] * G + head) * A + column[None, :]
    tl.store(to, value, mask=(place < places)[:, None] & (column < A)[None, :])


@triton.jit
def _pack(
    padded, into, rows, positions, T, A, half, octaves, row_stride, position_stride, head_stride, into_stride,
    SIGN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    row = tl.load(rows + token, mask=token < T, other=0)
    position = tl.load(positions + token, mask=token < T, other=0)
    inside = (token < T)[:, None] & (column < A)[None, :]
    at = padded + (row * row_stride + position * position_stride)[:, None] + head * head_stride
    value = _loaded(at, column, position, inside, half, octaves, SIGN)
    tl.store(into + token[:, None] * into_stride + head * A + column[None, :], value, mask=inside)


def _turning(width: int) -> tuple[int, float]:
    """Points of a head, and the octaves by which each is slower than the one before it."""
    half = width // 2
    return half, -math.log2(BASE) / max(1, half)


@operator("pad_heads")
def pad(packed_TGA: Tensor, sequences: Sequences, turned: int) -> Tensor:
    """B x L x G x A; the first `turned` heads are rotated."""
    packed_TGA = packed_TGA.contiguous()
    (_, groups, width), samples, longest = packed_TGA.shape, len(sequences.offsets_B1) - 1, sequences.longest
    padded_BLGA = packed_TGA.new_empty(samples, longest, groups, width)
    rows, columns = tile(width)
    places = samples * longest
    if padded_BLGA.numel():
        _pad[(triton.cdiv(places, rows), groups)](
            packed_TGA, padded_BLGA, sequences.offsets_B1.contiguous(), places, longest, groups, width, turned,
            *_turning(width), packed_TGA.stride(0), ROWS=rows, WIDTH=columns, num_warps=4,
        )  # fmt: skip
    return padded_BLGA


@operator("pack_heads")
def pack(padded_BLHA: Tensor, sequences: Sequences, into_THA: Tensor, *, back: bool) -> None:
    """Write the positions of all sequences, rotated back or as they are."""
    if padded_BLHA.stride(3) != 1:
        padded_BLHA = padded_BLHA.contiguous()
    tokens, heads, width = into_THA.shape
    assert into_THA.stride(1) == width, "the heads of a position lie together"
    assert into_THA.stride(2) == 1, "the numbers of a head lie together"
    rows, columns = tile(width)
    if into_THA.numel():
        row_stride, position_stride, head_stride, _ = padded_BLHA.stride()
        _pack[(triton.cdiv(tokens, rows), heads)](
            padded_BLHA, into_THA, sequences.rows_T, sequences.positions_T, tokens, width, *_turning(width),
            row_stride, position_stride, head_stride, into_THA.stride(0),
            SIGN=-1 if back else 0, ROWS=rows, WIDTH=columns, num_warps=4,
        )  # fmt: skip
