"""The way back on Hopper: keys stay, queries pass; what a block adds to their gradient is added by the copy engine.

Scores lie with the keys down and the queries across, so that only the queries' own gradient needs a turned block.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import put, silu_and_slope


@triton.jit
def _block(
    total_k, total_v, keys, values, q, grad, sum_q, at, column, i, first, tokens, half,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    queries = q.load([at + i, column])
    given = grad.load([at + i, column])
    score = tl.dot(keys, queries.T)
    dweight = tl.dot(values, given.T)
    weight, slope = silu_and_slope(score * half, True)
    if MASKED:
        m = i + tl.arange(0, QUERIES)[None, :]
        found = (m >= first + tl.arange(0, KEYS)[:, None]) & (m < tokens)
        weight = tl.where(found, weight, 0.0)
        # What a copy brought of the next row may be anything: it must not be multiplied.
        dweight = tl.where(found, dweight, 0.0)
    total_v = tl.dot(weight.to(given.dtype), given, total_v)
    dscore = (dweight * slope).to(queries.dtype)
    total_k = tl.dot(dscore, queries, total_k)
    sum_q.atomic_add([at + i, column], tl.dot(dscore.T, keys))
    return total_k, total_v


@triton.jit
def grad_keys(
    q, k, v, grad, sum_q, dk, dv, dk_token, dk_head, dv_token, dv_head, offsets, blocks, half, over,
    H: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pair, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * KEYS
    row, head = pair // H, pair % H
    start = tl.load(offsets + row)
    tokens = (tl.load(offsets + row + 1) - start).to(tl.int32)
    if first >= tokens:
        return
    at, column = start.to(tl.int32), head * D
    keys, values = k.load([at + first, column]), v.load([at + first, column])
    total_k = tl.zeros([KEYS, D], tl.float32)
    total_v = tl.zeros([KEYS, D], tl.float32)
    whole = first + KEYS
    edge = tl.maximum(tokens // QUERIES * QUERIES, whole)
    for i in tl.range(first, tl.minimum(whole, tokens), QUERIES, num_stages=1):
        total_k, total_v = _block(
            total_k, total_v, keys, values, q, grad, sum_q, at, column, i, first, tokens, half, QUERIES, KEYS, True
        )
    for i in tl.range(whole, edge, QUERIES, num_stages=STAGES):
        total_k, total_v = _block(
            total_k, total_v, keys, values, q, grad, sum_q, at, column, i, first, tokens, half, QUERIES, KEYS, False
        )
    for i in tl.range(edge, tokens, QUERIES, num_stages=1):
        total_k, total_v = _block(
            total_k, total_v, keys, values, q, grad, sum_q, at, column, i, first, tokens, half, QUERIES, KEYS, True
        )
    wide = head.to(tl.int64)
    put(dk + wide * dk_head, dk_token, start + first, tokens - first, total_k * (half * over), KEYS, D, D)
    put(dv + wide * dv_head, dv_token, start + first, tokens - first, total_v * over, KEYS, D, D)
