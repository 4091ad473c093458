"""The rule of dropout for the kernels of other ops."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..draw.triton import mix
from . import Dropout, signed


@triton.jit
def row_words(row, numbers, inside, first, second, LISTED: tl.constexpr):
    """The two random words of a row; its number is read from `numbers` where rows are listed."""
    number = row
    if LISTED:
        number = tl.load(numbers + row, mask=inside, other=0).to(tl.int64)
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    one, two = first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True)
    a = mix(mix(low ^ one) + two)
    return a, mix(a ^ two)


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
