"""Dropout that a seed, a row and a column decide: the same values in every body, in a recomputation, after a resume.

Other ops apply it: `assemble` to its tokens, `stu_output` to its features. Which values it drops is computed again
wherever it is needed. With `mix` the bijection of 32-bit words of ops/draw, all arithmetic modulo 2^32, shifts logical:

    first, second = halves of the seed's 64-bit hash
    a = mix(mix(row ^ first) + second)         b = mix(a ^ second)
    x = column * 0x9E3779B1 + a
    x = (x ^ (x >> 16) ^ b) * 0x7FEB352D
    word = (x ^ (x >> 15)) * 0x846CA68B        stays where word >= rate * 2^32

A row costs three mixes and an element eight instructions. The last fold of a mix is left out: it changes the low half
of the word alone, which a comparison hardly ever looks at. One fold less, though, and columns are seen to be related.
Rows of a seed differ in both a and b, so that no row repeats another. No mask is saved for the backward pass, and the
mask of a row depends neither on the width nor on the rows beside it.

Shapes: T rows, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...config import require
from ..draw import MULTIPLIERS
from ..draw.reference import mix
from ..hashing import hash_int


@dataclass(frozen=True)
class Dropout:
    """Which values are dropped and how the others are scaled."""

    rate: float
    """Share of the values that become 0; the others are multiplied by 1 / (1 - rate)."""
    seed: int = 0
    """See `dropout_seed`."""
    rows_T: Tensor | None = field(default=None, compare=False)
    """The row numbers, int64, if the rows are a selection from a larger tensor; None: 0, 1, 2 and so on."""

    def __post_init__(self) -> None:
        require(0.0 <= self.rate < 1.0, "rate", self.rate, "at least 0 and less than 1")

    @property
    def scale(self) -> float:
        return 1.0 / (1.0 - self.rate)

    @property
    def threshold(self) -> int:
        """Words below it are dropped."""
        return min(round(self.rate * 2.0**32), (1 << 32) - 1)

    @property
    def keys(self) -> tuple[int, int]:
        word = hash_int(self.seed, _STREAM)
        return word & 0xFFFFFFFF, word >> 32


NO_DROPOUT = Dropout(0.0)
COLUMN_STEP = 0x9E3779B1
_STREAM = 0x64726F70
"""Separates these random words from others that use the same seed."""


def dropout_seed(seed: int, step: int, layer: int, purpose: int | str = 0) -> int:
    """The seed of one dropout of one step: equal for equal arguments, unrelated for others."""
    parts = [purpose] if isinstance(purpose, int) else _name_numbers(purpose)
    word = seed
    for part in (step, layer, *parts):
        word = hash_int(part, word)
    return word >> 1


def _name_numbers(name: str) -> list[int]:
    """A name as numbers, its length first, as a negative number, which no numbered purpose is."""
    text = name.encode()
    return [-1 - len(text), *(int.from_bytes(text[at : at + 8], "little") for at in range(0, len(text), 8))]


def signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - (1 << 32) if word >> 31 else word


def keep_mask(dropout: Dropout, rows: int, columns: int, device: torch.device | str) -> Tensor:
    """Which values stay, rows x columns."""
    if dropout.rate == 0.0:
        return torch.ones(rows, columns, dtype=torch.bool, device=device)
    first, second = map(signed, dropout.keys)
    numbers_T = torch.arange(rows, device=device) if dropout.rows_T is None else dropout.rows_T
    a_T = mix(mix(numbers_T.to(torch.int32) ^ first) + second)
    b_T = mix(a_T ^ second)
    steps_D = torch.arange(columns, dtype=torch.int32, device=device) * signed(COLUMN_STEP)
    words_TD = steps_D + a_T.unsqueeze(1)
    words_TD ^= ((words_TD >> 16) & 0xFFFF) ^ b_T.unsqueeze(1)
    words_TD *= signed(MULTIPLIERS[0])
    words_TD ^= (words_TD >> 15) & 0x1FFFF
    words_TD *= signed(MULTIPLIERS[1])
    # With the top bit turned, signed words compare as the unsigned ones do.
    return (words_TD ^ -(1 << 31)) >= dropout.threshold - (1 << 31)


def factors(dropout: Dropout, like_TD: Tensor) -> Tensor:
    """The factor of each value: 0, or 1 / (1 - rate)."""
    kept_TD = keep_mask(dropout, like_TD.shape[0], like_TD.shape[1], like_TD.device)
    return kept_TD.to(like_TD.dtype) * dropout.scale


def dropped(x_TD: Tensor, dropout: Dropout) -> Tensor:
    """The values that stay, scaled, and 0 elsewhere; the same function is the backward pass."""
    if dropout.rate == 0.0:
        return x_TD
    wide_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
    return (wide_TD * factors(dropout, wide_TD)).to(x_TD.dtype)
