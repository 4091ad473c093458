"""Attention of every token: the forward pass and the backward pass for keys and values, with or without queries, or
for queries alone and a bias, in one order, so that repeats have the same bits; then both passes for the last token of
every row.

There is no softmax, so that blocks of keys do not depend on each other and nothing is carried but the sum. A token sees
itself and what lies before it: blocks on the diagonal and at the end of a row are masked, all others are whole.

With a bias a program has the queries of all heads. It leaves the gradients of their scores in memory, summed over
heads, and reads them again by distance and by time bucket. For the last token every key and value is read once: a row
is cut into chunks, one per program; their partial sums are written separately and added in order.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import add, bucket_of, product, put, row_of, share, silu, silu_and_slope, tile, with_bias

VARYING = ["pairs", "blocks", "group", "longest"]
"""Numbers of a batch: a kernel compiled anew for a convenient one would stop the training."""


@triton.jit
def _attend_block(
    total, q, k, v, k_token, v_token, start, j, m, tokens, half, positions, times,
    KEYS: tl.constexpr, A: tl.constexpr, V: tl.constexpr, PA: tl.constexpr, PV: tl.constexpr, MASKED: tl.constexpr,
    K: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    keys = tile(k, k_token, start + j, tokens - j, KEYS, A, PA, MASKED)
    score = product(q, tl.trans(keys), None, PRECISION)
    values = tile(v, v_token, start + j, tokens - j, KEYS, V, PV, MASKED)
    n = j + tl.arange(0, KEYS)
    score = with_bias(score * half, positions, times, start, m[:, None], n[None, :], tokens, K)
    weight = silu(score, TANH)
    if MASKED:
        weight = tl.where(m[:, None] >= n[None, :], weight, 0.0)
    return product(weight.to(values.dtype), values, total, PRECISION)


@triton.jit(do_not_specialize=VARYING)
def attend(
    q, k, v, out, offsets, q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    half, over, pairs, blocks, group, positions, times,
    H: tl.constexpr, A: tl.constexpr, V: tl.constexpr, PA: tl.constexpr, PV: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair, block = share(pairs, blocks, group)
    row, head = pair // H, (pair % H).to(tl.int64)
    start, tokens = row_of(offsets, row)
    first = (blocks - 1 - block) * QUERIES
    if first >= tokens:
        return
    end = tl.minimum(first + QUERIES, tokens)
    q, k, v, out = q + head * q_head, k + head * k_head, v + head * v_head, out + head * out_head
    edge = first // KEYS * KEYS
    queries = tile(q, q_token, start + first, tokens - first, QUERIES, A, PA, True)
    m = first + tl.arange(0, QUERIES)
    total = tl.zeros([QUERIES, PV], tl.float32)
    for j in tl.range(edge, end, KEYS, num_stages=1):
        total = _attend_block(
            total, queries, k, v, k_token, v_token, start, j, m, tokens, half, positions, times,
            KEYS, A, V, PA, PV, True, K, TANH, PRECISION,
        )  # fmt: skip
    for j in tl.range(0, edge, KEYS, num_stages=STAGES):
        total = _attend_block(
            total, queries, k, v, k_token, v_token, start, j, m, tokens, half, positions, times,
            KEYS, A, V, PA, PV, False, K, TANH, PRECISION,
        )  # fmt: skip
    put(out, out_token, start + first, tokens - first, total * over, QUERIES, V, PV)


@triton.jit
def _grad_keys_block(
    dk, dv, keys, values, q, grad, dq, q_token, grad_token, dq_token, start, i, n, tokens, half,
    positions, times,
    QUERIES: tl.constexpr, A: tl.constexpr, V: tl.constexpr, PA: tl.constexpr, PV: tl.constexpr, MASKED: tl.constexpr,
    K: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """Scores lie with the keys down and the queries across: the sums over queries then need no turning."""
    queries = tile(q, q_token, start + i, tokens - i, QUERIES, A, PA, MASKED)
    score = product(keys, tl.trans(queries), None, PRECISION)
    grads = tile(grad, grad_token, start + i, tokens - i, QUERIES, V, PV, MASKED)
    dweight = product(values, tl.trans(grads), None, PRECISION)
    m = i + tl.arange(0, QUERIES)
    score = with_bias(score * half, positions, times, start, m[None, :], n[:, None], tokens, K)
    weight, slope = silu_and_slope(score, TANH)
    dscore = dweight * slope
    if MASKED:
        visible = m[None, :] >= n[:, None]
        weight, dscore = tl.where(visible, weight, 0.0), tl.where(visible, dscore, 0.0)
    dv = product(weight.to(grads.dtype), grads, dv, PRECISION)
    dscore = dscore.to(queries.dtype)
    dk = product(dscore, queries, dk, PRECISION)
    if ATOMIC:
        part = product(tl.trans(dscore), keys, None, PRECISION)
        add(dq, dq_token, start + i, tokens - i, part, QUERIES, A, PA, MASKED)
    return dk, dv


@triton.jit(do_not_specialize=VARYING)
def grad_keys(
    grad, q, k, v, dq, dk, dv, offsets, grad_token, grad_head, q_token, q_head, k_token, k_head,
    v_token, v_head, dq_token, dq_head, dk_token, dk_head, dv_token, dv_head,
    half, over, pairs, blocks, group, positions, times,
    H: tl.constexpr, A: tl.constexpr, V: tl.constexpr, PA: tl.constexpr, PV: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values; with ATOMIC what they owe the queries is added to `dq`, still to be scaled."""
    pair, block = share(pairs, blocks, group)
    row, head = pair // H, (pair % H).to(tl.int64)
    start, tokens = row_of(offsets, row)
    first = block * KEYS
    if first >= tokens:
        return
    end = tl.minimum(first + KEYS, tokens)
    grad, q, k, v = grad + head * grad_head, q + head * q_head, k + head * k_head, v + head * v_head
    dq, dk, dv = dq + head * dq_head, dk + head * dk_head, dv + head * dv_head
    # All queries from `whole` on see all of these keys; from `edge` on there is no whole block of queries left.
    begin = first // QUERIES * QUERIES
    whole = (end + QUERIES - 1) // QUERIES * QUERIES
    edge = tl.maximum(tokens // QUERIES * QUERIES, whole)
    keys = tile(k, k_token, start + first, tokens - first, KEYS, A, PA, True)
    values = tile(v, v_token, start + first, tokens - first, KEYS, V, PV, True)
    n = first + tl.arange(0, KEYS)
    total_k = tl.zeros([KEYS, PA], tl.float32)
    total_v = tl.zeros([KEYS, PV], tl.float32)
    for turn in tl.range(begin, whole + tokens - edge, QUERIES, num_stages=1):
        i = tl.where(turn >= whole, turn - whole + edge, turn)
        total_k, total_v = _grad_keys_block(
            total_k, total_v, keys, values, q, grad, dq, q_token, grad_token, dq_token, start, i, n, tokens, half,
            positions, times, QUERIES, A, V, PA, PV, True, K, TANH, PRECISION, ATOMIC,
        )  # fmt: skip
    for i in tl.range(whole, edge, QUERIES, num_stages=STAGES):
        total_k, total_v = _grad_keys_block(
            total_k, total_v, keys, values, q, grad, dq, q_token, grad_token, dq_token, start, i, n, tokens, half,
            positions, times, QUERIES, A, V, PA, PV, False, K, TANH, PRECISION, ATOMIC,
        )  # fmt: skip
    put(dk, dk_token, start + first, tokens - first, total_k * (half * over), KEYS, A, PA)
    put(dv, dv_token, start + first, tokens - first, total_v * over, KEYS, V, PV)


DISTANCES = tl.constexpr(128)
"""Distances that are added up at a time."""
ROWS, WIDE = tl.constexpr(4), tl.constexpr(64)
"""Queries and keys whose time buckets are added up at a time."""


@triton.jit
def _grad_queries_block(
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
        total = _grad_queries_block(
            total, queries, grads, k, v, k_token, v_token, start, j, m, tokens, half,
            positions, times, dscores, longest, head, KEYS, A, V, PA, PV, True, K, TANH, PRECISION,
        )  # fmt: skip
    for j in tl.range(0, edge, KEYS, num_stages=STAGES):
        total = _grad_queries_block(
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
