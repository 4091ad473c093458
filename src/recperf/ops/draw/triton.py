"""Drawing a batch of uniform or Zipf ids on a GPU: a kernel for the lengths, a running sum, a kernel for the ids and
one for the rest.

Nothing waits for the host: each kernel reads the number of the batch on the device and computes its keys from it.
Drawing a word again is cheaper than writing and reading it, so kernels share only offsets and scores.

Shapes: F features, B samples, I ids of the longest bag, D dense features, V slots for ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator
from . import DENSE_SCALE, Buffers, DrawPlan

ELEMENTS = 1024
"""Words that a program computes at a time: 8 for each of the 128 threads."""
WIDEST = 64
"""Ids of a bag computed at a time."""


@triton.jit
def mix(word):
    """The bijection of 32-bit words."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _finalise(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _keys(index, stream):
    """The two keys of the batch: the halves of its hash, as ops/hashing.py defines it."""
    key = tl.load(stream).to(tl.uint64, bitcast=True)
    word = tl.load(index).to(tl.uint64, bitcast=True)
    word = _finalise(_finalise(word + key) + key)
    return (word & 0xFFFFFFFF).to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def _words(first, second, counter):
    """The random words of int64 counters."""
    return mix(mix((counter & 0xFFFFFFFF).to(tl.uint32) ^ first) + second)


@triton.jit
def _ids(words, feature, tables, KIND: tl.constexpr):
    """The ids that words draw from the feature's table."""
    rows_of, slope, start, power_of, factor, shift = tables
    rows = tl.load(rows_of + feature)
    if KIND == "uniform":
        ids = (words.to(tl.int64) * rows) >> 32
    else:
        log = words.to(tl.float64) * 2.3283064365386963e-10 * tl.load(slope + feature) + tl.load(start + feature)
        power = tl.load(power_of)
        if power != 0.0:
            log = tl.log(log) * power
        place = tl.minimum(tl.maximum(tl.exp(log) - 0.5, 0.0), (rows - 1).to(tl.float64))
        ids = (place.to(tl.int64) * tl.load(factor + feature) + tl.load(shift + feature)) % rows
    return ids


@triton.jit
def _drawn_lengths(first, second, bag, longest, first_length, FIXED: tl.constexpr):
    """round(max(1, u * longest)) in integers."""
    if FIXED:
        lengths = bag * 0 + longest
    else:
        words = _words(first, second, first_length + bag).to(tl.int64)
        lengths = tl.maximum((words * longest + 2147483648) >> 32, 1)
    return lengths


@triton.jit
def _first_occurrences(ids, lengths, place):
    """Mark the first occurrence of each id of a bag, and count the marked ids before each."""
    earlier = place[None, None, :] < place[None, :, None]
    same = ids[:, :, None] == ids[:, None, :]
    repeated = tl.max((same & earlier).to(tl.int32), axis=2)
    used = (repeated == 0) & (place[None, :] < lengths[:, None])
    return used, tl.sum((used[:, None, :] & earlier).to(tl.int64), axis=2)


@triton.jit
def _draw_lengths(
    index, stream, tables, max_ids_of, first_of, offsets, B, whole, begin, step, first_length,
    BAGS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, FIXED: tl.constexpr,
    DISTINCT: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    bag = feature * B + sample
    number = begin + sample * step
    first, second = _keys(index, stream)
    longest = tl.load(max_ids_of + feature)
    lengths = _drawn_lengths(first, second, feature * whole + number, longest, first_length, FIXED)
    if DISTINCT:
        place = tl.arange(0, WIDTH)
        counter = tl.load(first_of + feature) + number[:, None] * longest + place[None, :]
        ids = _ids(_words(first, second, counter), feature, tables, KIND)
        used, _ = _first_occurrences(ids, lengths, place)
        lengths = tl.sum(used.to(tl.int64), axis=1)
    tl.store(offsets + 1 + bag, lengths, mask=sample < B)
    tl.store(offsets + sample * 0, lengths * 0, mask=bag == 0)


@triton.jit
def _draw_ids(
    index, stream, tables, max_ids_of, first_of, score_keys, offsets, values, scores, B, whole, begin, step,
    first_length, BAGS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, FIXED: tl.constexpr,
    DISTINCT: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    bag = feature * B + sample
    number = begin + sample * step
    inside = sample < B
    first, second = _keys(index, stream)
    first_score = tl.load(score_keys + feature * 2).to(tl.uint32, bitcast=True)
    second_score = tl.load(score_keys + feature * 2 + 1).to(tl.uint32, bitcast=True)
    longest, counter = tl.load(max_ids_of + feature), tl.load(first_of + feature)
    begin = tl.load(offsets + bag, mask=inside, other=0)
    count = tl.load(offsets + bag + 1, mask=inside, other=0) - begin
    total = tl.zeros((BAGS,), tl.int64)
    for done in range(0, longest, WIDTH):
        place = done + tl.arange(0, WIDTH)
        words = _words(first, second, counter + number[:, None] * longest + place[None, :])
        ids = _ids(words, feature, tables, KIND)
        if DISTINCT:
            drawn = _drawn_lengths(first, second, feature * whole + number, longest, first_length, FIXED)
            used, before = _first_occurrences(ids, drawn, place)
            to = begin[:, None] + before
        else:
            used = place[None, :] < count[:, None]
            to = begin[:, None] + place[None, :]
        used = used & inside[:, None]
        tl.store(values + to, ids, mask=used)
        score = mix(mix(ids.to(tl.uint32) ^ first_score) + second_score).to(tl.int32, bitcast=True) >> 8
        total += tl.sum(tl.where(used, score, 0).to(tl.int64), axis=1)
    score = total.to(tl.float32) * 1.1920928955078125e-07 / tl.sqrt(tl.maximum(count, 1).to(tl.float32))
    tl.store(scores + bag, score, mask=inside)


@triton.jit
def _draw_samples(
    index, stream, weights, scores, dense, labels, B, begin, step, D, F, first_dense, first_label,
    SAMPLES: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)
    number = begin + sample * step
    inside = sample < B
    first, second = _keys(index, stream)
    logit = tl.zeros((SAMPLES,), tl.float32)
    for done in range(0, D, WIDTH):
        column = done + tl.arange(0, WIDTH)
        place = sample[:, None] * D + column[None, :]
        counter = first_dense + number[:, None] * D + column[None, :]
        words = _words(first, second, counter).to(tl.int32, bitcast=True)
        drawn = (words >> 8).to(tl.float32) * SCALE
        tl.store(dense + place, drawn, mask=inside[:, None] & (column < D)[None, :])
        weight = tl.load(weights + column, mask=column < D, other=0.0)
        logit += tl.sum(drawn * weight[None, :], axis=1)
    bag = sample
    for _ in range(F):
        logit += tl.load(scores + bag, mask=inside, other=0.0)
        bag += B
    chance = (_words(first, second, first_label + number) >> 8).to(tl.float32) * 5.9604644775390625e-08
    label = chance < 1.0 / (1.0 + tl.exp(-logit))
    tl.store(labels + sample, label.to(tl.float32), mask=inside)


@operator("draw")
def draw(plan: DrawPlan, index_1: Tensor, out: Buffers) -> None:
    """Fill the buffers with the batch whose number the tensor holds; the host does not wait."""
    samples, places = plan.samples, (plan.begin, plan.step)
    scores_FB = torch.empty(plan.features * samples, device=index_1.device)
    tables = plan.rows_F, plan.slope_F, plan.start_F, plan.power_1, plan.factor_F, plan.shift_F
    widest = triton.next_power_of_2(max(plan.max_ids))
    constants = {"KIND": plan.kind, "FIXED": plan.fixed, "DISTINCT": plan.distinct}
    # Where repeats are dropped, a bag is compared with itself, which needs space for its square.
    width = widest if plan.distinct else 1
    bags = max(1, ELEMENTS // width**2) if plan.distinct else ELEMENTS // 4
    _draw_lengths[(triton.cdiv(samples, bags), plan.features)](
        index_1, plan.stream_1, tables, plan.max_ids_F, plan.first_F, out.offsets_FB1, samples, plan.whole_samples,
        *places, plan.first_length, BAGS=bags, WIDTH=width, **constants,
    )  # fmt: skip
    torch.cumsum(out.offsets_FB1[1:], 0, out=out.offsets_FB1[1:])
    if not plan.distinct:
        width = min(WIDEST, widest)
        bags = max(1, ELEMENTS // width)
    _draw_ids[(triton.cdiv(samples, bags), plan.features)](
        index_1, plan.stream_1, tables, plan.max_ids_F, plan.first_F, plan.score_keys_F2, out.offsets_FB1,
        out.values_V, scores_FB, samples, plan.whole_samples, *places, plan.first_length,
        BAGS=bags, WIDTH=width, **constants,
    )  # fmt: skip
    width = min(ELEMENTS, triton.next_power_of_2(plan.dense))
    rows = max(1, ELEMENTS // width)
    _draw_samples[(triton.cdiv(samples, rows),)](
        index_1, plan.stream_1, plan.weights_D, scores_FB, out.dense_BD, out.labels_B, samples, *places, plan.dense,
        plan.features, plan.first_dense, plan.first_label, SAMPLES=rows, WIDTH=width, SCALE=DENSE_SCALE,
    )  # fmt: skip
