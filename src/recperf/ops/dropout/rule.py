"""Which values dropout keeps: a pure function of (seed, row, column), computed again wherever it is needed.

With `mix` the bijection of 32-bit words of ops/draw/plan.py, all arithmetic modulo 2^32, shifts logical:

    first, second = halves of the seed's 64-bit hash
    a = mix(mix(row ^ first) + second)         b = mix(a ^ second)
    x = column * 0x9E3779B1 + a
    x = (x ^ (x >> 16) ^ b) * 0x7FEB352D
    word = (x ^ (x >> 15)) * 0x846CA68B        kept where word >= rate * 2^32

A row costs three mixes and an element eight instructions. The last fold of a mix is left out: it changes the low half
of the word alone, which a comparison hardly ever looks at. One fold less, though, and columns are seen to be related.
Rows of a seed differ in both a and b, so that no row repeats another. No mask is saved for the backward pass, and the
mask of a row depends neither on the width nor on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ...config import require
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
