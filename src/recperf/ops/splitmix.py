"""The finaliser of splitmix64 (Steele, Lea, Flood 2014) on integers and arrays. Does not import torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, the increment of splitmix64."""
WORD = (1 << 64) - 1
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


def finalise_int(word: int) -> int:
    """The splitmix64 finaliser."""
    word &= WORD
    for shift, factor in ROUNDS:
        word = ((word ^ (word >> shift)) * factor) & WORD
    return word ^ (word >> LAST_SHIFT)


def finalise_numpy_(words: NDArray[np.uint64], scratch: NDArray[np.uint64] | None = None) -> NDArray[np.uint64]:
    """The finaliser in place; scratch has the shape of words and saves an allocation."""
    scratch = np.empty_like(words) if scratch is None else scratch
    for shift, factor in ROUNDS:
        np.right_shift(words, np.uint64(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        np.multiply(words, np.uint64(factor), out=words)
    np.right_shift(words, np.uint64(LAST_SHIFT), out=scratch)
    return np.bitwise_xor(words, scratch, out=words)
