"""Attention of every token: the forward pass, and the backward pass for keys and values, with or without queries.

There is no softmax, so that blocks of keys do not depend on each other and nothing is carried but the sum. A token sees
itself and what lies before it: blocks on the diagonal and at the end of a row are masked, all others are whole.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import add, product, put, row_of, share, silu, silu_and_slope, tile, with_bias

VARYING = ["pairs", "blocks", "group"]
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
