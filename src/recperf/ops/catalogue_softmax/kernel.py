"""The kernel of the softmax over a catalogue: scores of a program's own rows with rows of the other side, powers of two
of them, and the sums of the other side's rows that they weigh.

Own rows are positions or items. The width of a vector is filled up to a power of two, or to two: 96 is 64 and 32.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ..hstu_attention.tiles import product
from .reference import LOWEST

VARYING = ["own_count", "other_count", "span", "blocks", "units", "word_count", "first_item"]
"""Numbers of a batch: a kernel compiled anew for a convenient one would stop the training."""
HIGH = tl.constexpr(LOWEST)

POWERS = (1.0, 6.93146944e-1, 2.40221202e-1, 5.55071309e-2, 9.67554096e-3, 1.32764725e-3)
"""Coefficients of a polynomial for 2^x between -0.5 and 0.5, as in native.c."""


def _exponentials(emulated: int) -> str:
    """PTX of 2^x for four numbers: of `emulated` ones by the polynomial and a sum of exponents, without the
    special-function unit; of the others by that."""

    def number(value: float) -> str:
        return "0f" + struct.pack(">f", value).hex().upper()

    lines = ["{ .reg .f32 x, r, p; .reg .b32 n, m;"]
    for place in range(4):
        if place >= emulated:
            lines.append(f"ex2.approx.ftz.f32 ${place}, ${place + 4};")
            continue
        shift = number(12582912.0)
        lines += [f"max.f32 x, ${place + 4}, {number(-126.0)};", f"add.rn.f32 r, x, {shift};", "mov.b32 n, r;"]
        lines += [f"sub.rn.f32 r, r, {shift};", "sub.rn.f32 r, x, r;", f"mov.f32 p, {number(POWERS[-1])};"]
        lines += [f"fma.rn.f32 p, p, r, {number(power)};" for power in reversed(POWERS[:-1])]
        lines += ["mov.b32 m, p;", "shl.b32 n, n, 23;", "add.s32 m, m, n;", f"mov.b32 ${place}, m;"]
    return "\n".join([*lines, "}"])


_EMULATED_1, _EMULATED_2, _EMULATED_3 = (tl.constexpr(_exponentials(count)) for count in (1, 2, 3))
_REGISTERS = tl.constexpr("=f,=f,=f,=f,f,f,f,f")


@triton.jit
def _power_of_two(x, EMULATED: tl.constexpr):
    if EMULATED == 0:
        return tl.exp2(x)
    if EMULATED == 1:
        return tl.inline_asm_elementwise(_EMULATED_1, _REGISTERS, [x], dtype=tl.float32, is_pure=True, pack=4)
    if EMULATED == 2:
        return tl.inline_asm_elementwise(_EMULATED_2, _REGISTERS, [x], dtype=tl.float32, is_pure=True, pack=4)
    return tl.inline_asm_elementwise(_EMULATED_3, _REGISTERS, [x], dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def _rows(
    source, stride, first, count, BEGIN: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    ENGINE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows first .. of a matrix and its columns BEGIN .., zeros beyond its end and its width."""
    if ENGINE:
        rows = source.load([first, BEGIN])
    else:
        row, column = tl.arange(0, ROWS), BEGIN + tl.arange(0, WIDE)
        at = source + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])
        if MASKED:
            rows = tl.load(at, mask=(first + row < count)[:, None] & (column < D)[None, :], other=0.0)
        elif BEGIN + WIDE > D:
            rows = tl.load(at, mask=(column < D)[None, :], other=0.0)
        else:
            rows = tl.load(at)
    return rows


@triton.jit
def _masked(words, word_count, sets, targets, first_item, item, position, item_there, position_there):
    """Whether items are masked at positions; the target never is."""
    number = tl.load(sets + position, mask=position_there, other=0).to(tl.int64)
    word = tl.load(words + number * word_count + item // 32, mask=item_there & position_there, other=0)
    target = tl.load(targets + position, mask=position_there, other=-1)
    return (((word >> (item % 32)) & 1) != 0) & (target != first_item + item)


@triton.jit
def _step(
    sum_0, sum_1, total, high, own_0, own_1, plus_own, other_0, other_1, other_stride, plus_other, words, word_count,
    sets, targets, first_item, scale, row, own_count, c, other_count,
    D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, COLUMNS: tl.constexpr, ITEMS_OWN: tl.constexpr,
    SHIFTED: tl.constexpr, SUMS: tl.constexpr, TOTALS: tl.constexpr, ENGINE: tl.constexpr, EMULATED: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    block_0 = _rows(other_0, other_stride, c, other_count, 0, COLUMNS, D, W0, ENGINE, MASKED)
    score = product(own_0, tl.trans(block_0), None, PRECISION)
    if W1:
        block_1 = _rows(other_1, other_stride, c, other_count, W0, COLUMNS, D, W1, ENGINE, MASKED)
        score = product(own_1, tl.trans(block_1), score, PRECISION)
    column = c + tl.arange(0, COLUMNS)
    score = score * scale
    if plus_other is not None:
        if MASKED:
            plus = tl.load(plus_other + column, mask=column < other_count, other=float("-inf"))
        else:
            plus = tl.load(plus_other + column)
        score += plus[None, :]
    elif MASKED:
        score = tl.where((column < other_count)[None, :], score, float("-inf"))
    if plus_own is not None:
        score += plus_own[:, None]
    if words is not None:
        here, there = (row < own_count)[:, None], (column < other_count)[None, :]
        if ITEMS_OWN:
            hidden = _masked(
                words, word_count, sets, targets, first_item, row[:, None], column[None, :], here, there
            )  # fmt: skip
        else:
            hidden = _masked(
                words, word_count, sets, targets, first_item, column[None, :], row[:, None], there, here
            )  # fmt: skip
        score = tl.where(hidden, float("-inf"), score)
    if SHIFTED:
        higher = tl.maximum(high, tl.max(score, 1))
        fade = tl.exp2(high - higher)
        total *= fade
        sum_0 *= fade[:, None]
        if W1:
            sum_1 *= fade[:, None]
        high = higher
        score -= high[:, None]
    weight = _power_of_two(score, EMULATED)
    if TOTALS:
        total += tl.sum(weight, 1)
    if SUMS:
        weight = weight.to(block_0.dtype)
        sum_0 = product(weight, block_0, sum_0, PRECISION)
        if W1:
            sum_1 = product(weight, block_1, sum_1, PRECISION)
    return sum_0, sum_1, total, high


@triton.jit
def _unit(
    unit, own, own_stride, own_count, other_0, other_1, other_stride, other_count, plus_own, plus_other, times, slope,
    words, word_count, sets, targets, first_item, scale, span, blocks, sums, totals, highs,
    D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, ITEMS_OWN: tl.constexpr, SHIFTED: tl.constexpr, SUMS: tl.constexpr, TOTALS: tl.constexpr,
    ENGINE: tl.constexpr, EMULATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, first = unit // blocks, unit % blocks * ROWS
    begin = part * span
    end = tl.minimum(begin + span, other_count)
    whole = begin + (end - begin) // COLUMNS * COLUMNS
    row = first + tl.arange(0, ROWS)
    there = row < own_count
    own_0 = _rows(own, own_stride, first, own_count, 0, ROWS, D, W0, False, True)
    sum_0 = tl.zeros([ROWS, W0], tl.float32)
    own_1, sum_1 = own_0, tl.zeros([ROWS], tl.float32)
    if W1:
        own_1 = _rows(own, own_stride, first, own_count, W0, ROWS, D, W1, False, True)
        sum_1 = tl.zeros([ROWS, W1], tl.float32)
    total, high = tl.zeros([ROWS], tl.float32), tl.full([ROWS], HIGH, tl.float32)
    if plus_own is not None:
        plus_own = tl.load(plus_own + row, mask=there, other=0.0)
    for c in tl.range(begin, whole, COLUMNS, num_stages=STAGES):
        sum_0, sum_1, total, high = _step(
            sum_0, sum_1, total, high, own_0, own_1, plus_own, other_0, other_1, other_stride, plus_other, words,
            word_count, sets, targets, first_item, scale, row, own_count, c, other_count,
            D, W0, W1, COLUMNS, ITEMS_OWN, SHIFTED, SUMS, TOTALS, ENGINE, EMULATED, PRECISION, False,
        )  # fmt: skip
    for c in tl.range(whole, end, COLUMNS, num_stages=1):
        sum_0, sum_1, total, high = _step(
            sum_0, sum_1, total, high, own_0, own_1, plus_own, other_0, other_1, other_stride, plus_other, words,
            word_count, sets, targets, first_item, scale, row, own_count, c, other_count,
            D, W0, W1, COLUMNS, ITEMS_OWN, SHIFTED, SUMS, TOTALS, ENGINE, EMULATED, PRECISION, True,
        )  # fmt: skip
    if times is not None:
        factor = tl.load(times)
        total *= factor
        sum_0 *= factor * slope
        if W1:
            sum_1 *= factor * slope
    place = tl.cast(part, tl.int64) * own_count + first
    if SUMS:
        _put(sums, place, D, sum_0, there, 0, ROWS, D, W0)
        if W1:
            _put(sums, place, D, sum_1, there, W0, ROWS, D, W1)
    if TOTALS:
        tl.store(totals + place + tl.arange(0, ROWS), total, mask=there)
    if SHIFTED:
        tl.store(highs + place + tl.arange(0, ROWS), high, mask=there)


@triton.jit
def _put(
    out, place, stride, values, there, BEGIN: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr
):
    row, column = tl.arange(0, ROWS), BEGIN + tl.arange(0, WIDE)
    at = out + place * stride + (row[:, None] * stride + column[None, :])
    tl.store(at, values, mask=there[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=VARYING)
def sweep(
    own, own_stride, own_count, other_0, other_1, other_stride, other_count, plus_own, plus_other, times, slope, words,
    word_count, sets, targets, first_item, scale, span, blocks, units, sums, totals, highs,
    D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, ITEMS_OWN: tl.constexpr, SHIFTED: tl.constexpr, SUMS: tl.constexpr, TOTALS: tl.constexpr,
    ENGINE: tl.constexpr, EMULATED: tl.constexpr, PERSISTENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A unit of work is a block of own rows and a part of the other side. All blocks of a part come before the next
    part, so that programs that run together read the same rows of the other side, from the cache."""
    if PERSISTENT:
        for unit in tl.range(tl.program_id(0), units, tl.num_programs(0)):
            _unit(
                unit, own, own_stride, own_count, other_0, other_1, other_stride, other_count, plus_own, plus_other,
                times, slope, words, word_count, sets, targets, first_item, scale, span, blocks, sums, totals, highs,
                D, W0, W1, ROWS, COLUMNS, STAGES, ITEMS_OWN, SHIFTED, SUMS, TOTALS, ENGINE, EMULATED,
                PRECISION,
            )  # fmt: skip
    else:
        _unit(
            tl.program_id(0), own, own_stride, own_count, other_0, other_1, other_stride, other_count, plus_own,
            plus_other, times, slope, words, word_count, sets, targets, first_item, scale, span, blocks, sums, totals,
            highs,
            D, W0, W1, ROWS, COLUMNS, STAGES, ITEMS_OWN, SHIFTED, SUMS, TOTALS, ENGINE, EMULATED, PRECISION,
        )  # fmt: skip
