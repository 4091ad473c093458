"""The backward pass of a ReLU and of the bias before it, one pass over the gradient.

Shapes: B samples, N outputs of the layer, K of the layer above it, S stripes of samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator

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
