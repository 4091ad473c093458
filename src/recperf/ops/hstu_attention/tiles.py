"""What the attention kernels share: which part of a batch a program has, blocks of rows, products, biases and SiLU."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import math

import triton
import triton.language as tl

from .reference import BUCKET

PER_OCTAVE = tl.constexpr(math.log(2) / BUCKET)
"""Buckets from a time to twice that time."""


@triton.jit
def share(pairs, blocks, group):
    """Which row and head, and which block of it, this program has.

    Pairs of a group go together, so that what their blocks read lies in the cache; block by block, the heaviest first.
    """
    program = tl.program_id(0)
    turn = program // (group * blocks)
    rest = program % (group * blocks)
    width = min(group, pairs - turn * group)
    return turn * group + rest % width, rest // width


@triton.jit
def row_of(offsets, row):
    """Where a row begins, and its tokens."""
    start = tl.load(offsets + row).to(tl.int64)
    return start, (tl.load(offsets + row + 1) - start).to(tl.int32)


@triton.jit
def tile(
    base, stride, first, left, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr
):
    """Rows first .. of one head, zeros after `left` of them and beyond the width. Only whole rows are read unmasked."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    at = base + first * stride + (row[:, None] * stride + column[None, :])
    if MASKED:
        return tl.load(at, mask=(row < left)[:, None] & (column < WIDTH)[None, :], other=0.0)
    if WIDTH < PADDED:
        return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def put(base, stride, first, left, values, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    at = base + first * stride + (row[:, None] * stride + column[None, :])
    tl.store(at, values.to(base.dtype.element_ty), mask=(row < left)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def add(
    base, stride, first, left, values,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    at = base + first * stride + (row[:, None] * stride + column[None, :])
    if MASKED or WIDTH < PADDED:
        tl.atomic_add(at, values, mask=(row < left)[:, None] & (column < WIDTH)[None, :], sem="relaxed")
    else:
        tl.atomic_add(at, values, sem="relaxed")


@triton.jit
def product(left, right, total, PRECISION: tl.constexpr):
    """Of matrices, added to a total where there is one; "wide" is for Triton's interpreter, which has no bfloat16."""
    if PRECISION == "wide":
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def bucket_of(times, query, key, K: tl.constexpr):
    """The bucket of the time between tokens: from a logarithm that is a little too small, corrected by exact edges."""
    _, starts, key_times, query_times = times
    seconds = tl.abs(tl.load(query_times + query) - tl.load(key_times + key))
    near = tl.log2(tl.maximum(seconds, 1).to(tl.float32)) * PER_OCTAVE - 0.001
    bucket = tl.minimum(tl.maximum(near, 0.0).to(tl.int32), K - 1)
    return bucket + (seconds >= tl.load(starts + bucket + 1)).to(tl.int32)


@triton.jit
def with_bias(half_score, positions, times, start, m, n, tokens, K: tl.constexpr):
    """Half a score, and half the bias of its query m and key n; unchanged where there is none or no key is seen."""
    if positions is not None:
        bias = tl.load(positions + (m - n), mask=(m >= n) & (m < tokens), other=0.0).to(tl.float32)
        if times is not None:
            # What lies behind the end of the row gets some place of it.
            bucket = bucket_of(times, start + tl.minimum(m, tokens - 1), start + tl.minimum(n, tokens - 1), K)
            bias += tl.load(times[0] + bucket).to(tl.float32)
        half_score += 0.5 * bias
    return half_score


@triton.jit
def _tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def silu(half, TANH: tl.constexpr):
    """SiLU of twice the number: by one operation of the special-function unit where the hardware has it."""
    if TANH:
        return half + half * _tanh(half)
    return half * (2.0 / (1.0 + tl.exp(-2.0 * half)))


@triton.jit
def silu_and_slope(half, TANH: tl.constexpr):
    """SiLU of twice the number and twice its slope there."""
    if TANH:
        tanh = _tanh(half)
        opened = 1.0 + tanh
        return half * opened, opened * (1.0 + (half - half * tanh))
    opened = 2.0 / (1.0 + tl.exp(-2.0 * half))
    return half * opened, opened * (1.0 + half * (2.0 - opened))
