"""Passes of an MLP on a GPU: of a ReLU and the bias before it in one pass over the gradient; of the last layer and its
loss in one kernel, whose programs read some rows of the input once; copies and SGD of some tensors in each launch, with
many programs for each.

Shapes: B samples, N outputs of a layer (inputs of the last), K of the layer above it, S stripes of samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator
from . import reference
from .reference import End

STRIPE, ROWS, COLUMNS = 32, 32, 128
"""Samples whose bias gradients one program sums, and the tile it loads at a time."""
TILE, DEPTH = 128, 64
"""Samples and outputs of a program's part of a product, and how much of the sum it loads at a time."""


@triton.jit
def _backward(
    gradient, factor, activation, out, sums, B, N,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIPE: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    stripe = tl.program_id(1)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in range(stripe * STRIPE, stripe * STRIPE + STRIPE, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < B)[:, None] & (column < N)[None, :]
        place = row[:, None].to(tl.int64) * N + column[None, :]
        if OUTER:
            left = tl.load(gradient + row, mask=row < B, other=0.0)
            right = tl.load(factor + column, mask=column < N, other=0.0)
            slopes = (left[:, None].to(tl.float32) * right[None, :].to(tl.float32)).to(out.dtype.element_ty)
        else:
            slopes = tl.load(gradient + place, mask=inside, other=0.0)
        passed = tl.load(activation + place, mask=inside, other=0.0) > 0
        slopes = tl.where(passed, slopes, 0.0)
        tl.store(out + place, slopes, mask=inside)
        total += tl.sum(slopes.to(tl.float32), 0)
    tl.store(sums + stripe * N + column, total, mask=column < N)


@triton.jit
def _product(
    gradient, weight, activation, out, sums, B, K, N, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    stripe = tl.program_id(1)
    row = stripe * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    left = gradient + row[:, None].to(tl.int64) * K + depth[None, :]
    right = weight + depth[:, None].to(tl.int64) * N + column[None, :]
    total = tl.zeros([TILE, TILE], dtype=tl.float32)
    for first in range(0, K, DEPTH):
        there = first + depth < K
        a = tl.load(left, mask=(row < B)[:, None] & there[None, :], other=0.0)
        b = tl.load(right, mask=there[:, None] & (column < N)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        left += DEPTH
        right += DEPTH * N
    inside = (row < B)[:, None] & (column < N)[None, :]
    place = row[:, None].to(tl.int64) * N + column[None, :]
    passed = tl.load(activation + place, mask=inside, other=0.0) > 0
    slopes = tl.where(passed, total.to(out.dtype.element_ty), 0.0)
    tl.store(out + place, slopes, mask=inside)
    tl.store(sums + stripe * N + column, tl.sum(slopes.to(tl.float32), 0), mask=column < N)


def backward(gradient_BN: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before the ReLU, and that of the bias in float32, as stripes that are still to be summed."""
    return _launched(gradient_BN.contiguous(), gradient_BN, activation_BN.contiguous(), outer=False)


def outer_backward(gradient_B1: Tensor, weight_1N: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The same below a layer of one output, whose input gradient is the outer product of the first two."""
    return _launched(gradient_B1.contiguous(), weight_1N.contiguous(), activation_BN.contiguous(), outer=True)


def product_backward(gradient_BK: Tensor, weight_KN: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The same below a layer of several outputs, whose input gradient is the product of the first two."""
    # Of half-precision numbers one kernel does both; Triton's interpreter has no products of them.
    if gradient_BK.is_cuda == (gradient_BK.element_size() > 2):
        return backward(gradient_BK.mm(weight_KN), activation_BN)
    return _product_launched(gradient_BK.contiguous(), weight_KN.contiguous(), activation_BN.contiguous())


@operator("product_relu_backward", flops=lambda gradient_BK, weight_KN, _: 2 * gradient_BK.numel() * weight_KN.shape[1])
def _product_launched(gradient_BK: Tensor, weight_KN: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    (batch, depth), outputs = gradient_BK.shape, weight_KN.shape[1]
    stripes = triton.cdiv(batch, TILE)
    out_BN, sums_SN = torch.empty_like(activation_BN), torch.empty(stripes, outputs, device=activation_BN.device)
    if batch:
        _product[(triton.cdiv(outputs, TILE), stripes)](
            gradient_BK, weight_KN, activation_BN, out_BN, sums_SN, batch, depth, outputs,
            TILE=TILE, DEPTH=DEPTH, PRECISION="ieee", num_warps=8, num_stages=4,
        )  # fmt: skip
    return out_BN, sums_SN


@operator("relu_backward")
def _launched(gradient: Tensor, factor: Tensor, activation_BN: Tensor, *, outer: bool) -> tuple[Tensor, Tensor]:
    batch, outputs = activation_BN.shape
    stripes = triton.cdiv(batch, STRIPE)
    sums_SN = torch.empty(stripes, outputs, device=activation_BN.device)
    out_BN = torch.empty_like(activation_BN)
    if batch:
        _backward[(triton.cdiv(outputs, COLUMNS), stripes)](
            gradient, factor, activation_BN, out_BN, sums_SN, batch, outputs,
            ROWS=ROWS, COLUMNS=COLUMNS, STRIPE=STRIPE, OUTER=outer, num_warps=4,
        )  # fmt: skip
    return out_BN, sums_SN


ELEMENTS = 16_384
"""Numbers of the input that a program holds."""
MOST_ROWS = 16


@triton.jit
def _forward_backward(
    inputs, weight, bias, labels, logits, losses, to_input, to_input_bias, to_weight, to_bias, B, N, negative, positive,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MSE: tl.constexpr,
):  # fmt: skip
    stripe = tl.program_id(0).to(tl.int64)
    row, column = stripe * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < B)[:, None] & (column < N)[None, :]
    place = row[:, None] * N + column[None, :]
    value_in = tl.load(inputs + place, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    label = tl.load(labels + row, mask=row < B, other=0.0)
    logit = tl.sum(value_in * weights[None, :], 1) + tl.load(bias).to(tl.float32)
    probability = 1.0 / (1.0 + tl.exp(-logit))
    if MSE:
        value = (probability - label) * (probability - label)
        slope = 2.0 * (probability - label) * probability * (1.0 - probability)
    else:
        value = tl.maximum(logit, 0.0) - logit * label + tl.log(1.0 + tl.exp(-tl.abs(logit)))
        slope = probability - label
    factor = tl.where(row < B, tl.where(label > 0.5, positive, negative), 0.0) / B
    value, slope = tl.where(row < B, value * factor, 0.0), tl.where(row < B, slope * factor, 0.0)
    gradient = tl.where(value_in > 0, slope[:, None] * weights[None, :], 0.0).to(to_input.dtype.element_ty)
    tl.store(to_input + place, gradient, mask=inside)
    tl.store(logits + row, logit, mask=row < B)
    aside = stripe * N + column
    tl.store(to_input_bias + aside, tl.sum(gradient.to(tl.float32), 0), mask=column < N)
    tl.store(to_weight + aside, tl.sum(slope[:, None] * value_in, 0), mask=column < N)
    tl.store(losses + stripe, tl.sum(value, 0))
    tl.store(to_bias + stripe, tl.sum(slope, 0))


@operator("last_layer", flops=lambda input_BN, *_, **__: 6 * input_BN.numel())
def forward_backward(
    input_BN: Tensor,
    weight_1N: Tensor,
    bias_1: Tensor,
    labels_B: Tensor,
    kind: str,
    weights: tuple[float, float] = (1.0, 1.0),
) -> End:
    """`kind` is bce or mse; `weights` are those of a negative and of a positive sample."""
    batch, inputs = input_BN.shape
    columns = triton.next_power_of_2(inputs)
    rows = max(1, min(MOST_ROWS, ELEMENTS // columns))
    stripes, device = triton.cdiv(batch, rows), input_BN.device
    input_BN, labels_B = input_BN.contiguous(), labels_B.contiguous()
    end = End(
        logits_B=torch.empty(batch, device=device),
        loss_S=torch.empty(stripes, device=device),
        to_input_BN=torch.empty_like(input_BN),
        to_input_bias_SN=torch.empty(stripes, inputs, device=device),
        to_weight_SN=torch.empty(stripes, inputs, device=device),
        to_bias_S=torch.empty(stripes, device=device),
    )
    if batch:
        _forward_backward[(stripes,)](
            input_BN, weight_1N.contiguous(), bias_1, labels_B, end.logits_B, end.loss_S, end.to_input_BN,
            end.to_input_bias_SN, end.to_weight_SN, end.to_bias_S, batch, inputs, float(weights[0]), float(weights[1]),
            ROWS=rows, COLUMNS=columns, MSE=kind == "mse", num_warps=8,
        )  # fmt: skip
    return end


BLOCK = 2048
"""Numbers of a program."""
AT_ONCE = 16
"""Tensors of a launch, whose arguments must all fit."""


@triton.jit
def _copy(targets, sources, firsts, sizes, widths, strides, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    for number in tl.static_range(COUNT):
        if (program >= firsts[number]) & (program < firsts[number + 1]):
            at = (program - firsts[number]).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < sizes[number]
            value = tl.load(sources[number] + at, mask=inside)
            to = at // widths[number] * strides[number] + at % widths[number]
            tl.store(targets[number] + to, value.to(targets[number].dtype.element_ty), mask=inside)


@triton.jit
def _descend(parameters, gradients, rates, firsts, sizes, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    rate = tl.load(rates)
    for number in tl.static_range(COUNT):
        if (program >= firsts[number]) & (program < firsts[number + 1]):
            at = (program - firsts[number]).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < sizes[number]
            value = tl.load(parameters[number] + at, mask=inside)
            value -= rate * tl.load(gradients[number] + at, mask=inside)
            tl.store(parameters[number] + at, value, mask=inside)


@operator("copy_many")
def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, or into the first columns of a wider one, which keeps the others."""
    if not all(one.is_contiguous() for one in (*targets, *sources)):
        reference.copy(targets, sources)
        return
    for first in range(0, len(targets), AT_ONCE):
        to, of = tuple(targets[first : first + AT_ONCE]), tuple(sources[first : first + AT_ONCE])
        firsts, sizes = _blocks(of)
        widths = tuple(max(1, one.shape[-1]) for one in of)
        strides = tuple(max(1, one.shape[-1]) for one in to)
        if firsts[-1]:
            _copy[(firsts[-1],)](to, of, firsts, sizes, widths, strides, COUNT=len(to), BLOCK=BLOCK, num_warps=4)


@operator("descend_many", updates=True)
def descend(parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: float | Tensor) -> None:
    """Subtract each gradient times the rate."""
    if not all(one.is_contiguous() and one.dtype == torch.float32 for one in (*parameters, *gradients)):
        reference.descend(parameters, gradients, rate)
        return
    rates = rate if isinstance(rate, Tensor) else torch.full((1,), rate, device=parameters[0].device)
    for first in range(0, len(parameters), AT_ONCE):
        mine, theirs = tuple(parameters[first : first + AT_ONCE]), tuple(gradients[first : first + AT_ONCE])
        firsts, sizes = _blocks(mine)
        if firsts[-1]:
            _descend[(firsts[-1],)](mine, theirs, rates, firsts, sizes, COUNT=len(mine), BLOCK=BLOCK, num_warps=4)


def _blocks(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first program of each tensor, and after the last, and how many numbers it has."""
    sizes = tuple(one.numel() for one in tensors)
    firsts = [0]
    for size in sizes:
        firsts.append(firsts[-1] + -(-size // BLOCK))
    return tuple(firsts), sizes
