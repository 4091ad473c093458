"""What the attention kernels share: which part of a batch a program has, which blocks need a mask, and SiLU.

Every position has a place e: its own, or what remains of it after the prefix, at most that of the targets. Places grow
along a row, so that the blocks in which all is seen lie together, between blocks at the edges of the mask.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl


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
def row_of(offsets, targets, row, context, TARGETS: tl.constexpr, CONTEXT: tl.constexpr):
    """Where a row begins, its tokens, how much the prefix shifts places, and the place of the targets."""
    start = tl.load(offsets + row).to(tl.int64)
    tokens = (tl.load(offsets + row + 1) - start).to(tl.int32)
    shift = 0
    if CONTEXT:
        shift = context - 1
    last = tokens - shift
    if TARGETS:
        last -= tl.load(targets + row).to(tl.int32)
    return start, tokens, shift, last


@triton.jit
def place(position, shift, last, TARGETS: tl.constexpr, CONTEXT: tl.constexpr):
    if CONTEXT:
        position = tl.maximum(position - shift, 0)
    if TARGETS:
        position = tl.minimum(position, last)
    return position


@triton.jit
def seen(
    query, key, shift, last, window,
    TARGETS: tl.constexpr, WINDOW: tl.constexpr, CONTEXT: tl.constexpr,
):  # fmt: skip
    """Which queries see which keys; positions that broadcast against each other. No query sees beyond its row."""
    if not (TARGETS or WINDOW or CONTEXT):
        return query >= key
    at = place(query, shift, last, TARGETS, CONTEXT)
    other = place(key, shift, last, TARGETS, CONTEXT)
    visible = at > other
    if WINDOW:
        visible = visible & (at - other <= window)
    if CONTEXT:
        visible = visible | ((at == 0) & (other < last))
    return visible | (query == key)


@triton.jit
def keys_of(
    first, end, tokens, shift, last, window, BLOCK: tl.constexpr,
    TARGETS: tl.constexpr, WINDOW: tl.constexpr, CONTEXT: tl.constexpr,
):  # fmt: skip
    """Blocks of keys for queries first .. end - 1: masked from `begin`, whole from `whole`, masked again from `edge` to
    `stop`; of these, `skip` keys from `gap` on are targets that no query here is."""
    low = place(first, shift, last, TARGETS, CONTEXT)
    stop = end
    if CONTEXT:
        stop = tl.where(first <= shift, tokens, end)
    edge = tl.where(low > 0, low + shift, 0) // BLOCK * BLOCK
    begin = 0
    whole = 0
    if WINDOW:
        high = place(end - 1, shift, last, TARGETS, CONTEXT)
        begin = tl.where(low > window, low - window + shift, 0) // BLOCK * BLOCK
        whole = (tl.where(high > window, high - window + shift, 0) + BLOCK - 1) // BLOCK * BLOCK
        whole = tl.minimum(whole, (stop + BLOCK - 1) // BLOCK * BLOCK)
        edge = tl.maximum(edge, whole)
    gap = 0
    skip = 0
    if TARGETS:
        gap = (tl.maximum(last + shift, 0) + BLOCK - 1) // BLOCK * BLOCK
        skip = tl.maximum(first // BLOCK * BLOCK - gap, 0)
    return begin, whole, edge, stop, gap, skip


@triton.jit
def masked_key(turn, whole, edge, gap, skip, TARGETS: tl.constexpr, WINDOW: tl.constexpr):
    """The masked blocks one after the other, those before the whole ones and those behind."""
    key = turn + edge - whole
    if WINDOW:
        key = tl.where(turn >= whole, key, turn)
    if TARGETS:
        key = tl.where(key >= gap, key + skip, key)
    return key


@triton.jit
def queries_of(
    first, end, tokens, shift, last, window, BLOCK: tl.constexpr,
    TARGETS: tl.constexpr, WINDOW: tl.constexpr, CONTEXT: tl.constexpr,
):  # fmt: skip
    """Blocks of queries that see keys first .. end - 1: the prefix up to `prefix`, then masked from `begin`, whole from
    `whole`, masked again from `edge` to `stop`."""
    low = place(first, shift, last, TARGETS, CONTEXT)
    high = place(end - 1, shift, last, TARGETS, CONTEXT)
    begin = first // BLOCK * BLOCK
    stop = tokens
    whole = high + shift + 1
    edge = tokens
    if WINDOW:
        far = high + window + shift + 1
        near = low + window + shift + 1
        if TARGETS:
            # Targets share one place: whoever sees it from the end of the window sees all of them.
            far = tl.where(high + window >= last, tokens, far)
            near = tl.where(low + window >= last, tokens, near)
        stop = tl.minimum(stop, far)
        edge = tl.minimum(edge, near)
    prefix = 0
    if CONTEXT:
        prefix = tl.minimum((shift + BLOCK) // BLOCK * BLOCK, begin)
    if TARGETS:
        stop = tl.where(low >= last, tl.minimum(stop, end), stop)
        whole = tl.where(high >= last, stop, whole)
        edge = tl.where(high >= last, stop, edge)
        if CONTEXT:
            prefix = tl.where(low >= last, 0, prefix)
    whole = tl.minimum((whole + BLOCK - 1) // BLOCK * BLOCK, (stop + BLOCK - 1) // BLOCK * BLOCK)
    edge = tl.maximum(edge // BLOCK * BLOCK, whole)
    return prefix, begin, whole, edge, stop


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
