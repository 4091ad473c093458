"""Dropout in a kernel, and its rule for the kernels of other ops.

Shapes: T rows, D columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator
from .rule import Dropout, signed

ROWS, COLUMNS = 4, 512
"""The tile of a program."""


@triton.jit
def _mix(word):
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def row_words(row, numbers, inside, first, second, LISTED: tl.constexpr):
    """The two random words of a row; its number is read from `numbers` where rows are listed."""
    number = row
    if LISTED:
        number = tl.load(numbers + row, mask=inside, other=0).to(tl.int64)
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    one, two = first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True)
    a = _mix(_mix(low ^ one) + two)
    return a, _mix(a ^ two)


@triton.jit
def factors(column, a, b, threshold, scale):
    """What the elements of each row are multiplied with: 0, or what makes up for the others."""
    word = (column.to(tl.uint32) * 0x9E3779B1)[None, :] + a[:, None]
    word = (word ^ (word >> 16) ^ b[:, None]) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return tl.where(word >= threshold.to(tl.uint32, bitcast=True), scale, 0.0)


def arguments(dropout: Dropout) -> dict[str, Any]:
    """The arguments of every kernel with dropout; keys always have one type, or a step might compile again."""
    first, second = map(signed, dropout.keys) if dropout.rate else (0, 0)
    return {
        "numbers": dropout.rows_T,
        "first": first,
        "second": second,
        "threshold": signed(dropout.threshold),
        "scale": dropout.scale,
        "DROP": dropout.rate > 0.0,
        "LISTED": dropout.rows_T is not None,
    }


@triton.jit(do_not_specialize=["T", "first", "second", "threshold"])
def _forward(
    x, out, numbers, T, D, x_stride, first, second, threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROP: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < T)[:, None] & (column < D)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    a, b = row_words(row, numbers, row < T, first, second, LISTED)
    value *= factors(column, a, b, threshold, scale)
    tl.store(out + row[:, None] * D + column[None, :], value, mask=inside)


@operator("dropout")
def forward(x_TD: Tensor, dropout: Dropout) -> Tensor:
    """The values that stay, scaled, and 0 elsewhere; the same function is the backward pass."""
    if dropout.rate == 0.0:
        return x_TD
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    tokens, width = x_TD.shape
    out_TD = torch.empty(tokens, width, dtype=x_TD.dtype, device=x_TD.device)
    if tokens and width:
        _forward[(triton.cdiv(tokens, ROWS), triton.cdiv(width, COLUMNS))](
            x_TD, out_TD, T=tokens, D=width, x_stride=x_TD.stride(0), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
            **arguments(dropout),
        )  # fmt: skip
    return out_TD
