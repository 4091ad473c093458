"""Attention of the last token of each row: every key and value is read once, and that is all the time it takes.

A row is cut into chunks, one per program; their partial sums are written separately and added in order.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import put, row_of, silu, silu_and_slope, tile

VARYING = ["pairs"]
"""Numbers of a batch: a kernel compiled anew for a convenient one would stop the training."""


@triton.jit(do_not_specialize=VARYING)
def attend_last(
    q, k, v, parts, offsets, q_token, q_head, k_token, k_head, v_token, v_head,
    half, over, pairs,
    H: tl.constexpr, A: tl.constexpr, V: tl.constexpr, PA: tl.constexpr, PV: tl.constexpr,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // H, pair % H
    start, tokens = row_of(offsets, row)
    k, v = k + head * k_head, v + head * v_head
    column_a, column_v = tl.arange(0, PA), tl.arange(0, PV)
    query = tl.load(q + row * q_token + head * q_head + column_a, mask=column_a < A, other=0.0).to(tl.float32)
    total = tl.zeros([PV], tl.float32)
    for j in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, tokens), KEYS):
        keys = tile(k, k_token, start + j, tokens - j, KEYS, A, PA, True).to(tl.float32)
        values = tile(v, v_token, start + j, tokens - j, KEYS, V, PV, True).to(tl.float32)
        weight = silu(tl.sum(keys * query[None, :], 1) * half, TANH)
        total += tl.sum(values * weight[:, None], 0)
    tl.store(parts + (chunk.to(tl.int64) * pairs + pair) * V + column_v, total * over, mask=column_v < V)


@triton.jit(do_not_specialize=VARYING)
def grad_last(
    grad, q, k, v, parts, dk, dv, offsets, grad_token, grad_head, q_token, q_head, k_token, k_head,
    v_token, v_head, dk_token, dk_head, dv_token, dv_head, half, over, pairs,
    H: tl.constexpr, A: tl.constexpr, V: tl.constexpr, PA: tl.constexpr, PV: tl.constexpr,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // H, pair % H
    start, tokens = row_of(offsets, row)
    k, v, dk, dv = k + head * k_head, v + head * v_head, dk + head * dk_head, dv + head * dv_head
    column_a, column_v = tl.arange(0, PA), tl.arange(0, PV)
    query = tl.load(q + row * q_token + head * q_head + column_a, mask=column_a < A, other=0.0).to(tl.float32)
    at = grad + row * grad_token + head * grad_head
    grads = tl.load(at + column_v, mask=column_v < V, other=0.0).to(tl.float32)
    total = tl.zeros([PA], tl.float32)
    for j in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, tokens), KEYS):
        keys = tile(k, k_token, start + j, tokens - j, KEYS, A, PA, True).to(tl.float32)
        values = tile(v, v_token, start + j, tokens - j, KEYS, V, PV, True).to(tl.float32)
        weight, slope = silu_and_slope(tl.sum(keys * query[None, :], 1) * half, TANH)
        dscore = tl.sum(values * grads[None, :], 1) * slope
        dscore = dscore * (half * over)
        total += tl.sum(keys * dscore[:, None], 0)
        put(dk, dk_token, start + j, tokens - j, query[None, :] * dscore[:, None], KEYS, A, PA)
        put(dv, dv_token, start + j, tokens - j, grads[None, :] * (weight * over)[:, None], KEYS, V, PV)
    tl.store(parts + (chunk.to(tl.int64) * pairs + pair) * A + column_a, total, mask=column_a < A)
