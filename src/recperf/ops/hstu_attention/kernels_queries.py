"""The backward pass of the queries alone, and of a bias: in one order, so that repeats have the same bits.

With a bias a program has the queries of all heads. It leaves the gradients of their scores in memory, summed over
heads, and reads them again by distance and by time bucket.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import bucket_of, product, put, row_of, share, silu_and_slope, tile, with_bias

VARYING = ["pairs", "blocks", "group", "longest"]
"""Numbers of a batch: a kernel compiled anew for a convenient one would stop the training."""
DISTANCES = tl.constexpr(128)
"""Distances that are added up at a time."""
ROWS, WIDE = tl.constexpr(4), tl.constexpr(64)
"""Queries and keys whose time buckets are added up at a time."""


@triton.jit
def _block(
    total, queries, grads, k, v, k_token, v_token, start, j, m, tokens, half, positions, times, dscores, longest, head,
    KEYS: tl.constexpr, A: tl.constexpr, V: tl.constexpr, PA: tl.constexpr, PV: tl.constexpr, MASKED: tl.constexpr,
    K: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    keys = tile(k, k_token, start + j, tokens - j, KEYS, A, PA, MASKED)
    score = product(queries, tl.trans(keys), None, PRECISION)
    values = tile(v, v_token, start + j, tokens - j, KEYS, V, PV, MASKED)
    dweight = product(grads, tl.trans(values), None, PRECISION)
    n = j + tl.arange(0, KEYS)
    score = with_bias(score * half, positions, times, start, m[:, None], n[None, :], tokens, K)
    _, slope = silu_and_slope(score, TANH)
    dscore = dweight * slope
    if MASKED:
        dscore = tl.where(m[:, None] >= n[None, :], dscore, 0.0)
    if dscores is not None:
        at = dscores + (m[:, None] * longest + n[None, :])
        inside = (m < tokens)[:, None] & (n < tokens)[None, :]
        tl.store(at, dscore + tl.load(at, mask=inside & (head > 0), other=0.0), mask=inside)
    return product(dscore.to(keys.dtype), keys, total, PRECISION)


@triton.jit
def _one_head(
    grad, q, k, v, dq, grad_token, grad_head, q_token, q_head, k_token, k_head, v_token, v_head, dq_token, dq_head,
    half, over, start, tokens, first, head, positions, times, dscores, longest,
    A: tl.constexpr, V: tl.constexpr, PA: tl.constexpr, PV: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    grad, q, k, v, dq = (
        grad + head * grad_head,
        q + head * q_head,
        k + head * k_head,
        v + head * v_head,
        dq + head * dq_head,
    )
    end = tl.minimum(first + QUERIES, tokens)
    edge = first // KEYS * KEYS
    queries = tile(q, q_token, start + first, tokens - first, QUERIES, A, PA, True)
    grads = tile(grad, grad_token, start + first, tokens - first, QUERIES, V, PV, True)
    m = first + tl.arange(0, QUERIES)
    total = tl.zeros([QUERIES, PA], tl.float32)
    for j in tl.range(edge, end, KEYS, num_stages=1):
        total = _block(
            total, queries, grads, k, v, k_token, v_token, start, j, m, tokens, half,
            positions, times, dscores, longest, head, KEYS, A, V, PA, PV, True, K, TANH, PRECISION,
        )  # fmt: skip
    for j in tl.range(0, edge, KEYS, num_stages=STAGES):
        total = _block(
            total, queries, grads, k, v, k_token, v_token, start, j, m, tokens, half,
            positions, times, dscores, longest, head, KEYS, A, V, PA, PV, False, K, TANH, PRECISION,
        )  # fmt: skip
    put(dq, dq_token, start + first, tokens - first, total * (half * over), QUERIES, A, PA)


@triton.jit(do_not_specialize=VARYING)
def grad_queries(
    grad, q, k, v, dq, offsets, grad_token, grad_head, q_token, q_head, k_token, k_head, v_token, v_head,
    dq_token, dq_head, half, over, pairs, blocks, group, positions, times, dscores, parts, longest,
    H: tl.constexpr, A: tl.constexpr, V: tl.constexpr, PA: tl.constexpr, PV: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, HIGH: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """A program has one head, and `pairs` are those of rows and heads; with a bias it has all, and `pairs` are rows.

    `parts` takes the bias's gradient of every program: by distance, then by bucket.
    """
    pair, block = share(pairs, blocks, group)
    row = pair if positions is not None else pair // H
    start, tokens = row_of(offsets, row)
    first = (blocks - 1 - block) * QUERIES
    if first >= tokens:
        return
    if positions is None:
        _one_head(
            grad, q, k, v, dq, grad_token, grad_head, q_token, q_head, k_token, k_head, v_token, v_head,
            dq_token, dq_head, half, over, start, tokens, first, (pair % H).to(tl.int64), None, None, None, 0,
            A, V, PA, PV, QUERIES, KEYS, STAGES, K, TANH, PRECISION,
        )  # fmt: skip
    else:
        dscores += start * longest
        for head in range(H):
            _one_head(
                grad, q, k, v, dq, grad_token, grad_head, q_token, q_head, k_token, k_head, v_token, v_head,
                dq_token, dq_head, half, over, start, tokens, first, tl.cast(head, tl.int64), positions, times,
                dscores, longest, A, V, PA, PV, QUERIES, KEYS, STAGES, K, TANH, PRECISION,
            )  # fmt: skip
            # The next head, or the sums, may read what other threads have written.
            tl.debug_barrier()
        parts += (pair.to(tl.int64) * blocks + block) * (longest + K)
        _sum_distances(dscores, longest, parts, first, tokens, 0.5 * over, QUERIES)
        if times is not None:
            _sum_buckets(
                dscores, longest, parts + longest, times, start, first, tokens, 0.5 * over, QUERIES, K, HIGH, SUMMED
            )


@triton.jit
def _sum_distances(dscores, longest, parts, first, tokens, factor, QUERIES: tl.constexpr):
    m = (first + tl.arange(0, QUERIES))[:, None]
    for near in range(0, tl.minimum(first + QUERIES, tokens), DISTANCES):
        distance = near + tl.arange(0, DISTANCES)
        n = m - distance[None, :]
        total = tl.sum(tl.load(dscores + (m * longest + n), mask=(m < tokens) & (n >= 0), other=0.0), 0)
        tl.store(parts + distance, total * factor, mask=distance < tokens)


@triton.jit
def _sum_buckets(
    dscores, longest, parts, times, start, first, tokens, factor,
    QUERIES: tl.constexpr, K: tl.constexpr, HIGH: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Buckets form a matrix of 16 columns. A pair's share in it is the product of a column vector, with its gradient in
    the row of its bucket, and a row vector, with 1 in the column: a product of matrices adds up many pairs at once."""
    high, low = tl.arange(0, HIGH), tl.arange(0, 16)
    lane = tl.arange(0, ROWS * WIDE)
    total = tl.zeros([HIGH, 16], tl.float32)
    for i in range(first, tl.minimum(first + QUERIES, tokens), ROWS):
        m = i + lane // WIDE
        for j in range(0, tl.minimum(i + ROWS, tokens), WIDE):
            n = j + lane % WIDE
            value = tl.load(dscores + (m * longest + n), mask=(m < tokens) & (n <= m), other=0.0)
            query, key = start + tl.minimum(m, tokens - 1), start + tl.minimum(n, tokens - 1)
            bucket = bucket_of(times, query, key, K)
            left = tl.where((bucket // 16)[None, :] == high[:, None], value[None, :], 0.0)
            right = tl.where((bucket % 16)[:, None] == low[None, :], 1.0, 0.0)
            total = product(left, right, total, SUMMED)
    bucket = high[:, None] * 16 + low[None, :]
    tl.store(parts + bucket, total * factor, mask=bucket < K)
