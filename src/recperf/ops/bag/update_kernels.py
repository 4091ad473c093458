"""Kernels that update table rows from sorted ids: chunk by chunk, then the rows that continue in the next chunk."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _runs(flag_a, sum_a, flag_b, sum_b):
    return flag_a | flag_b, tl.where(flag_b != 0, sum_b, sum_a + sum_b)


@triton.jit
def load_rows(table, state, key, here, D, columns, wide, RULE: tl.constexpr):
    """Weights and up to two states of one row per lane, where `here`."""
    place = key[:, None].to(tl.int64) * D + columns[None, :]
    mask = here[:, None] & wide[None, :]
    # Read once; in the cache rows would take the place of gradients.
    row = tl.load(table + place, mask=mask, other=0.0, eviction_policy="evict_first")
    old = row
    old2 = row
    if RULE == "rowwise-adagrad":
        old = tl.load(state + key, mask=here, other=0.0)
    elif RULE == "adagrad":
        old = tl.load(state + place, mask=mask, other=0.0)
    elif RULE == "adam":
        place += key[:, None].to(tl.int64) * D
        old = tl.load(state + place, mask=mask, other=0.0)
        old2 = tl.load(state + place + D, mask=mask, other=0.0)
    elif RULE == "rowwise-adam":
        place += key[:, None].to(tl.int64)
        old = tl.load(state + place, mask=mask, other=0.0)
        old2 = tl.load(state + key.to(tl.int64) * (D + 1) + D, mask=here, other=0.0)
    return row, old, old2


@triton.jit
def apply_update(
    table, state, numbers, key, row, old, old2, grad, here, eps, decay, D, columns, wide, RULE: tl.constexpr
):  # fmt: skip
    """Update one row per lane, in state and weights, where `here`; `row`, `old` and `old2` hold what they were."""
    rate = tl.load(numbers)
    place = key[:, None].to(tl.int64) * D + columns[None, :]
    mask = here[:, None] & wide[None, :]
    step = rate * grad
    if RULE == "rowwise-adagrad":
        now = old + tl.sum(grad * grad, 1) / D
        tl.store(state + key, now, mask=here)
        step = step / (tl.sqrt(now) + eps)[:, None]
    if RULE == "adagrad":
        each = old + grad * grad
        tl.store(state + place, each, mask=mask)
        step = step / (tl.sqrt(each) + eps)
    if RULE == "adam":
        mean = old + tl.load(numbers + 1) * (grad - old)
        squared = old2 + tl.load(numbers + 2) * (grad * grad - old2)
        moments = place + key[:, None].to(tl.int64) * D
        tl.store(state + moments, mean, mask=mask)
        tl.store(state + moments + D, squared, mask=mask)
        step = tl.load(numbers + 3) * mean / (tl.sqrt(squared * tl.load(numbers + 4)) + eps)
    if RULE == "rowwise-adam":
        mean = old + tl.load(numbers + 1) * (grad - old)
        square = old2 + tl.load(numbers + 2) * (tl.sum(grad * grad, 1) / D - old2)
        tl.store(state + place + key[:, None].to(tl.int64), mean, mask=mask)
        tl.store(state + key.to(tl.int64) * (D + 1) + D, square, mask=here)
        step = tl.load(numbers + 3) * mean / (tl.sqrt(square * tl.load(numbers + 4)) + eps)[:, None]
    tl.store(table + place, row * (1.0 - rate * decay) - step, mask=mask, eviction_policy="evict_first")


@triton.jit
def update_chunks(
    table, state, keys, bags, gradient, heads, tails, numbers, used, rows, eps, decay, scale, D,
    WIDTH: tl.constexpr, C: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, C)
    at = chunk * C + lanes
    count = tl.load(used)
    opening = tl.load(keys + chunk * C, mask=chunk * C < count, other=rows)
    if opening < rows:
        columns = tl.arange(0, WIDTH)
        wide = columns < D
        key = tl.load(keys + at, mask=at < count, other=rows)
        bag = tl.load(bags + at, mask=at < count, other=0).to(tl.int64)
        before = tl.load(keys + at - 1, mask=(at > 0) & (at < count), other=-1)
        after = tl.load(keys + at + 1, mask=at + 1 < count, other=rows)
        earlier = tl.load(keys + chunk * C - 1, mask=chunk > 0, other=-1)
        live = key < rows
        last = key != after
        came_in = live & (key == opening) & (opening == earlier)
        done = live & last & (came_in == 0)
        # Loads of gradients, weights and state are independent and overlap.
        total = tl.load(
            gradient + bag[:, None] * D + columns[None, :], mask=live[:, None] & wide[None, :], other=0.0,
            eviction_policy="evict_last",
        )  # fmt: skip
        row, old, old2 = load_rows(table, state, key, done, D, columns, wide, RULE)
        total = total * scale
        if tl.sum(((key == before) & (lanes > 0) & live).to(tl.int32), 0) > 0:
            begins_row = ((key != before) | (lanes == 0)).to(tl.int32)
            flags = begins_row[:, None] + tl.zeros([C, WIDTH], dtype=tl.int32)
            _, total = tl.associative_scan((flags, total), 0, _runs)
        goes_on = live & (last == 0) & (lanes == C - 1)
        to_head = came_in & (last | (lanes == C - 1))
        to_tail = goes_on & (came_in == 0)
        if tl.sum((to_head | to_tail).to(tl.int32), 0) > 0:
            aside = chunk * D + columns[None, :] + tl.zeros([C, 1], dtype=tl.int64)
            tl.store(heads + aside, total, mask=to_head[:, None] & wide[None, :])
            tl.store(tails + aside, total, mask=to_tail[:, None] & wide[None, :])
        apply_update(table, state, numbers, key, row, old, old2, total, done, eps, decay, D, columns, wide, RULE)


@triton.jit
def _starts_here(keys, chunk, count, rows, C: tl.constexpr):
    """Whether a row begins in the chunk and continues in the next."""
    end = chunk * C + C - 1
    inside = end + 1 < count
    key = tl.load(keys + end, mask=inside, other=rows)
    goes_on = inside & (key < rows) & (key == tl.load(keys + end + 1, mask=inside, other=-1))
    opening = tl.load(keys + chunk * C, mask=inside, other=-1)
    earlier = tl.load(keys + chunk * C - 1, mask=inside & (chunk > 0), other=-1)
    return goes_on & ((opening != key) | (earlier != key))


@triton.jit
def join_chunks(
    table, state, keys, heads, tails, numbers, used, rows, eps, decay, D,
    WIDTH: tl.constexpr, C: tl.constexpr, J: tl.constexpr, LOOK: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * LOOK
    lanes = tl.arange(0, LOOK)
    count = tl.load(used)
    left = _starts_here(keys, first + lanes, count, rows, C).to(tl.int32)
    columns = tl.arange(0, WIDTH)
    wide = columns < D
    one = tl.arange(0, 1)
    while tl.sum(left, 0) > 0:
        which = tl.argmax(left, 0)
        left = tl.where(lanes == which, 0, left)
        chunk = first + which
        key = tl.load(keys + chunk * C + C - 1) + one.to(keys.dtype.element_ty)
        row, old, old2 = load_rows(table, state, key, one == 0, D, columns, wide, RULE)
        total = tl.load(tails + chunk * D + columns, mask=wide, other=0.0)
        following = chunk + 1
        joined = J
        while joined == J:
            there = following + tl.arange(0, J)
            same = tl.load(keys + there * C, mask=there * C < count, other=rows) == key
            part = tl.load(heads + there[:, None] * D + columns[None, :], mask=same[:, None] & wide[None, :], other=0.0)
            total += tl.sum(part, 0)
            joined = tl.sum(same.to(tl.int32), 0)
            following += J
        apply_update(
            table, state, numbers, key, row, old, old2, total[None, :], one == 0, eps, decay, D, columns, wide, RULE
        )  # fmt: skip
