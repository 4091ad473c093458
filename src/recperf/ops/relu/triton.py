"""The backward pass of a ReLU and of the bias before it, one pass over the gradient.

Shapes: B samples, N outputs of the layer, S stripes of samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRIPE, ROWS, COLUMNS = 64, 16, 64
"""Samples whose bias gradients one program sums, and the tile it loads at a time."""


@triton.jit
def _backward(
    gradient, activation, out, sums, B, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIPE: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    stripe = tl.program_id(1)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in range(stripe * STRIPE, stripe * STRIPE + STRIPE, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < B)[:, None] & (column < N)[None, :]
        place = row[:, None].to(tl.int64) * N + column[None, :]
        given = tl.load(gradient + place, mask=inside, other=0.0)
        passed = tl.load(activation + place, mask=inside, other=0.0) > 0
        given = tl.where(passed, given, 0.0)
        tl.store(out + place, given, mask=inside)
        total += tl.sum(given.to(tl.float32), 0)
    tl.store(sums + stripe * N + column, total, mask=column < N)


def backward(gradient_BN: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before the ReLU, and that of the bias in float32, as stripes that are still to be summed."""
    batch, outputs = gradient_BN.shape
    gradient_BN, activation_BN = gradient_BN.contiguous(), activation_BN.contiguous()
    stripes = triton.cdiv(batch, STRIPE)
    sums_SN = torch.empty(stripes, outputs, device=gradient_BN.device)
    out_BN = torch.empty_like(gradient_BN)
    if batch:
        _backward[(triton.cdiv(outputs, COLUMNS), stripes)](
            gradient_BN, activation_BN, out_BN, sums_SN, batch, outputs,
            ROWS=ROWS, COLUMNS=COLUMNS, STRIPE=STRIPE, num_warps=4,
        )  # fmt: skip
    return out_BN, sums_SN
