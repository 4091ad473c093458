"""The way there on Hopper, in Gluon: which product waits for which is written out instead of left to the compiler.

One warp copies blocks of keys and values; two groups of four warps have 64 queries each. While the tensor cores do the
scores of the next block, the others turn this block's into weights; the products with the values follow while the next
weights are made. A slot of the ring holds keys i + 1 and values i: what the same moment of the loop needs.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_COPYING_REGISTERS = gl.constexpr(24)


def described(rows_TC: Tensor, size: int) -> Any:
    """A descriptor for the copy engine: this many rows at a time, the columns of one head."""
    shape = [size, 128]
    layout = gl.NVMMASharedLayout.get_default_for(shape, _KINDS[rows_TC.dtype])
    return TensorDescriptor.from_tensor(rows_TC, shape, layout)


@gluon.jit
def _copy(k, v, keys_s, values_s, full, empty, row, column, blocks, KEYS: gl.constexpr, STAGES: gl.constexpr):
    for turn in range(blocks + 1):
        slot = turn % STAGES
        mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
        one = (turn == 0) or (turn == blocks)
        mbarrier.expect(full.index(slot), k.block_type.nbytes, pred=one)
        mbarrier.expect(full.index(slot), 2 * k.block_type.nbytes, pred=not one)
        tma.async_copy_global_to_shared(
            k, [row + turn * KEYS, column], full.index(slot), keys_s.index(slot), pred=turn < blocks
        )
        tma.async_copy_global_to_shared(
            v, [row + (turn - 1) * KEYS, column], full.index(slot), values_s.index(slot), pred=turn >= 1
        )


@gluon.jit
def _weights(
    score, half, i, first, kind: gl.constexpr, MASKED: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    scores: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """SiLU of the scores by the hardware's tanh, as the left side of a product."""
    x = score * half
    tanh = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    weight = x + x * tanh
    if MASKED:
        m = first + gl.arange(0, QUERIES, gl.SliceLayout(1, scores))
        n = i * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, scores))
        weight = gl.where(m[:, None] >= n[None, :], weight, 0.0)
    return gl.convert_layout(weight.to(kind), operand)


@gluon.jit
def _stage(
    score, total, queries, keys_s, values_s, full, empty, nothing, half, i, first, kind: gl.constexpr,
    MASKED: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    scores: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """Scores i are known, weights i - 1 being multiplied: begin scores i + 1, make weights i, begin their product."""
    turn = i + 1
    slot = turn % STAGES
    mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
    following = warpgroup_mma(queries, keys_s.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    weight = _weights(score, half, i, first, kind, MASKED, QUERIES, KEYS, scores, operand)
    so_far = warpgroup_mma_wait(1, deps=[total])
    total = warpgroup_mma(weight, values_s.index(slot), so_far, is_async=True)
    score = warpgroup_mma_wait(1, deps=[following])
    mbarrier.arrive(empty.index(i % STAGES), count=1)
    return score, total


@gluon.jit
def _multiply(
    out, queries_s, queries_full, keys_s, values_s, full, empty, start, column, first, tokens, blocks, half, over,
    kind: gl.constexpr, D: gl.constexpr, ROW: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    mbarrier.wait(queries_full, 0)
    # In registers, because the other side of every product has to come from shared memory, which has no more to give.
    queries = queries_s.load(gl.DotOperandLayout(0, scores, 2))
    nothing = gl.zeros([QUERIES, KEYS], gl.float32, scores)
    total = warpgroup_mma_init(gl.zeros([QUERIES, D], gl.float32, sums))
    mbarrier.wait(full.index(0), 0)
    score = warpgroup_mma_wait(
        0, deps=[warpgroup_mma(queries, keys_s.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)]
    )
    for i in range(blocks - 2):
        score, total = _stage(
            score, total, queries, keys_s, values_s, full, empty, nothing, half, i, first, kind, False, QUERIES, KEYS,
            STAGES, scores, operand,
        )  # fmt: skip
    # A block of queries is two of keys: the last two cross the diagonal.
    score, total = _stage(
        score, total, queries, keys_s, values_s, full, empty, nothing, half, blocks - 2, first, kind, True, QUERIES,
        KEYS, STAGES, scores, operand,
    )  # fmt: skip
    weight = _weights(score, half, blocks - 1, first, kind, True, QUERIES, KEYS, scores, operand)
    so_far = warpgroup_mma_wait(0, deps=[total])
    slot = blocks % STAGES
    mbarrier.wait(full.index(slot), (blocks // STAGES) & 1)
    done = warpgroup_mma_wait(0, deps=[warpgroup_mma(weight, values_s.index(slot), so_far, is_async=True)])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    result = gl.convert_layout((done * over).to(kind), stored)
    m = first + gl.arange(0, QUERIES, gl.SliceLayout(1, stored))
    d = gl.arange(0, D, gl.SliceLayout(0, stored))
    gl.store(out + (start + m)[:, None] * ROW + column + d[None, :], result, mask=(m < tokens)[:, None])


@gluon.jit
def attend(
    q, k, v, out, offsets, row_blocks, half, over,
    H: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    gl.static_assert(QUERIES == 2 * KEYS)
    pair = gl.program_id(0) // row_blocks
    # The longest way first: what starts last should end soon.
    first = (row_blocks - 1 - gl.program_id(0) % row_blocks) * QUERIES
    start = gl.load(offsets + pair // H)
    tokens = (gl.load(offsets + pair // H + 1) - start).to(gl.int32)
    if first < tokens:
        row, column = start.to(gl.int32), pair % H * D
        queries_s = gl.allocate_shared_memory(q.dtype, [QUERIES, D], q.layout)
        keys_s = gl.allocate_shared_memory(k.dtype, [STAGES, KEYS, D], k.layout)
        values_s = gl.allocate_shared_memory(v.dtype, [STAGES, KEYS, D], v.layout)
        queries_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(queries_full, count=1)
        for slot in gl.static_range(STAGES):
            mbarrier.init(full.index(slot), count=1)
            mbarrier.init(empty.index(slot), count=1)
        fence_async_shared()
        mbarrier.expect(queries_full, q.block_type.nbytes)
        tma.async_copy_global_to_shared(q, [row + first, column], queries_full, queries_s)
        blocks = (first + QUERIES) // KEYS
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        out, queries_s, queries_full, keys_s, values_s, full, empty, start, column, first, tokens,
                        blocks, half, over, q.dtype, D, H * D, QUERIES, KEYS, STAGES,
                    ),
                ),
                (_copy, (k, v, keys_s, values_s, full, empty, row, column, blocks, KEYS, STAGES)),
            ],
            [1],
            [_COPYING_REGISTERS],
        )  # fmt: skip
