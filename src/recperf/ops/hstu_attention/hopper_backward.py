"""The backward pass on Hopper, in Gluon: keys stay, queries pass, eight warps of 128 keys and 64 queries at a time.

Scores lie with the keys down and the queries across, so that only the queries' own gradient needs a turned block, which
goes through shared memory. The products of a block are queued so that the tensor cores have work while weights and
slopes are made and while a block's share of the queries' gradient is added up in memory. There is one barrier a block:
behind it nobody reads the block before any more, and the next copy may take its place.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Named otherwise before triton 3.7."""
_UNSEEN = gl.constexpr(-60.0)
"""Half a score whose weight and slope are exactly zero: the hardware's tanh is -1 there."""


@gluon.jit
def _add_pairs(base, offsets, values):
    """Two neighbours at a time are added to memory at base + 4 * offset; negative offsets are left out."""
    return gl.inline_asm_elementwise(
        """{
            .reg .pred kept;
            .reg .b64 at;
            setp.ge.s32 kept, $4, 0;
            mad.wide.s32 at, $4, 4, $2;
            @kept red.global.add.v2.f32 [at], {$6, $7};
            mov.u32 $0, 0;
            mov.u32 $1, 0;
        }""",
        "=r,=r,l,l,r,r,f,f",
        [base, offsets, values],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def _copy(q, grad, queries_s, grads_s, full, row, column, turn, turns, QUERIES: gl.constexpr, STAGES: gl.constexpr):
    slot = turn % STAGES
    there = turn < turns
    mbarrier.expect(full.index(slot), 2 * q.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(
        q, [row + turn * QUERIES, column], full.index(slot), queries_s.index(slot), pred=there
    )
    tma.async_copy_global_to_shared(
        grad, [row + turn * QUERIES, column], full.index(slot), grads_s.index(slot), pred=there
    )


@gluon.jit
def _block(
    total_k, total_v, keys, values, queries_s, grads_s, turned_s, q, grad, full, row, column, turn, turns, sums,
    first, i, tokens, half, kind: gl.constexpr, MASKED: gl.constexpr, D: gl.constexpr, ROW: gl.constexpr,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, QUERIES, 16])
    by_key: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, D, 16])
    by_query: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, D // (warps // 4), 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, by_key, 2)
    slot = turn % STAGES
    queries, grads_tile = queries_s.index(slot), grads_s.index(slot)
    nothing = gl.zeros([KEYS, QUERIES], gl.float32, scores)
    mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
    scoring = warpgroup_mma(keys, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)
    weighing = warpgroup_mma(values, grads_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(1, deps=[scoring]) * half
    if MASKED:
        n = first + gl.arange(0, KEYS, gl.SliceLayout(1, scores))[:, None]
        m = i + gl.arange(0, QUERIES, gl.SliceLayout(0, scores))[None, :]
        x = gl.where((m >= n) & (m < tokens), x, _UNSEEN)
    opened = 1.0 + gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
    weight = x * opened
    slope = opened + weight * (2.0 - opened)
    weight = gl.convert_layout(weight.to(kind), operand)
    adding_v = warpgroup_mma(weight, grads_tile, total_v, is_async=True)
    dweight = warpgroup_mma_wait(1, deps=[weighing])
    dscore = (dweight * slope).to(kind)
    turned = turned_s.index(turn % 2)
    turned.store(dscore)
    dscore = gl.convert_layout(dscore, operand)
    fence_async_shared()
    _meet()
    _copy(q, grad, queries_s, grads_s, full, row, column, turn + STAGES - 1, turns, QUERIES, STAGES)
    none = gl.zeros([QUERIES, D], gl.float32, by_query)
    adding_q = warpgroup_mma(turned.permute((1, 0)), keys, none, use_acc=False, is_async=True)
    adding_k = warpgroup_mma(dscore, queries, total_k, is_async=True)
    total_v, dq = warpgroup_mma_wait(1, deps=[adding_v, adding_q])
    at = i + gl.arange(0, QUERIES, gl.SliceLayout(1, by_query))[:, None]
    d = gl.arange(0, D, gl.SliceLayout(0, by_query))[None, :]
    offsets = gl.where((at < tokens) & (d >= 0), at * ROW + d, -1)
    _add_pairs(gl.full_like(offsets, 0).to(gl.int64) + sums, offsets, dq)
    total_k = warpgroup_mma_wait(0, deps=[adding_k])
    return total_k, total_v


@gluon.jit
def _store(out, token, start, first, tokens, values, kind: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr):
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    n = first + gl.arange(0, KEYS, gl.SliceLayout(1, stored))
    d = gl.arange(0, D, gl.SliceLayout(0, stored))
    rows = gl.convert_layout(values.to(kind), stored)
    gl.store(out + (start + n)[:, None] * token + d[None, :], rows, mask=(n < tokens)[:, None])


@gluon.jit
def grad_keys(
    q, k, v, grad, sum_q, dk, dv, dk_token, dk_head, dv_token, dv_head, row_offsets, row_blocks, half, over,
    H: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    pair, first = gl.program_id(0) // row_blocks, gl.program_id(0) % row_blocks * KEYS
    start = gl.load(row_offsets + pair // H)
    tokens = (gl.load(row_offsets + pair // H + 1) - start).to(gl.int32)
    if first < tokens:
        kind: gl.constexpr = q.dtype
        by_key: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
        turned: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], kind)
        head = pair % H
        # Queries before the first key see none of these.
        row, column = (start + first).to(gl.int32), head * D
        keys_s = gl.allocate_shared_memory(kind, [KEYS, D], k.layout)
        values_s = gl.allocate_shared_memory(kind, [KEYS, D], v.layout)
        queries_s = gl.allocate_shared_memory(kind, [STAGES, QUERIES, D], q.layout)
        grads_s = gl.allocate_shared_memory(kind, [STAGES, QUERIES, D], grad.layout)
        turned_s = gl.allocate_shared_memory(kind, [2, KEYS, QUERIES], turned)
        keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(keys_full, count=1)
        for slot in gl.static_range(STAGES):
            mbarrier.init(full.index(slot), count=1)
        fence_async_shared()
        mbarrier.expect(keys_full, 2 * k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [row, column], keys_full, keys_s)
        tma.async_copy_global_to_shared(v, [row, column], keys_full, values_s)
        turns = (tokens - first + QUERIES - 1) // QUERIES
        for slot in gl.static_range(STAGES - 1):
            _copy(q, grad, queries_s, grads_s, full, row, column, slot, turns, QUERIES, STAGES)
        total_k = gl.zeros([KEYS, D], gl.float32, by_key)
        total_v = gl.zeros([KEYS, D], gl.float32, by_key)
        sums = (sum_q + start * (H * D) + column).to(gl.int64)
        mbarrier.wait(keys_full, 0)
        crossing: gl.constexpr = KEYS // QUERIES
        whole = gl.maximum((tokens - first) // QUERIES, crossing)
        for turn in range(gl.minimum(crossing, turns)):
            total_k, total_v = _block(
                total_k, total_v, keys_s, values_s, queries_s, grads_s, turned_s, q, grad, full, row, column, turn,
                turns, sums, first, first + turn * QUERIES, tokens, half, kind, True, D, H * D, QUERIES, KEYS, STAGES,
            )  # fmt: skip
        for turn in range(crossing, whole):
            total_k, total_v = _block(
                total_k, total_v, keys_s, values_s, queries_s, grads_s, turned_s, q, grad, full, row, column, turn,
                turns, sums, first, first + turn * QUERIES, tokens, half, kind, False, D, H * D, QUERIES, KEYS, STAGES,
            )  # fmt: skip
        for turn in range(whole, turns):
            total_k, total_v = _block(
                total_k, total_v, keys_s, values_s, queries_s, grads_s, turned_s, q, grad, full, row, column, turn,
                turns, sums, first, first + turn * QUERIES, tokens, half, kind, True, D, H * D, QUERIES, KEYS, STAGES,
            )  # fmt: skip
        wide = head.to(gl.int64)
        _store(dk + wide * dk_head, dk_token, start, first, tokens, total_k * (half * over), kind, KEYS, D)
        _store(dv + wide * dv_head, dv_token, start, first, tokens, total_v * over, kind, KEYS, D)
