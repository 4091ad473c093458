"""One seeded 64-bit hash that gives the same bits in Python integers, numpy, torch on a CPU and torch on a GPU.

With `mix` for the splitmix64 finaliser (Steele, Lea, Flood 2014: shifts 30, 27, 31 and two odd multipliers) and all
arithmetic modulo 2^64 on unsigned words, shifts logical:

    key  = mix(seed + golden)                  golden = 2^64 / golden ratio, the increment of splitmix64
    hash = mix(mix(id + key) + key)

For each seed this is a bijection of the 64-bit words, so that two ids never share a hash. The key is added before and
between the rounds: one addition alone would make the hash of one seed that of another with its ids shifted, and a seed
joined by XOR would only permute one set of outputs. Negative ids are their two's complement, hence differ from 0 and
from their complements.

A row of a table is floor(top 32 bits * rows / 2^32). Each row then owns floor or ceil of 2^32 / rows of the equally
likely tops, so that its chance is off by a relative rows / 2^32 at most: 0.05 % for two million rows.

Beside it xxh64 (Collet), bit for bit, for many short keys of whole 8-byte words. Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, the increment of splitmix64."""
WORD = (1 << 64) - 1
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
MOST_ROWS = 1 << 31
"""(2^32 - 1) * 2^31 is the largest product of its kind that a signed word holds."""
Words = NDArray[np.uint64]


def signed(word: int) -> int:
    """The int64 with the same 64 bits as the word."""
    word &= WORD
    return word - (1 << 64) if word >> 63 else word


def finalise_int(word: int) -> int:
    """The splitmix64 finaliser."""
    word &= WORD
    for shift, factor in ROUNDS:
        word = ((word ^ (word >> shift)) * factor) & WORD
    return word ^ (word >> LAST_SHIFT)


def finalise_numpy_(words: Words) -> Words:
    """The finaliser in place."""
    scratch = np.empty_like(words)
    for shift, factor in ROUNDS:
        np.right_shift(words, np.uint64(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        np.multiply(words, np.uint64(factor), out=words)
    np.right_shift(words, np.uint64(LAST_SHIFT), out=scratch)
    return np.bitwise_xor(words, scratch, out=words)


def finalise_torch_(words: Tensor) -> Tensor:
    """The finaliser in place, on int64 words."""
    if words.device.type == "cpu":
        # numpy has the logical shift that torch lacks, which saves a third of the passes over memory.
        finalise_numpy_(words.numpy().view(np.uint64))
        return words
    return finalise_signed_(words)


def finalise_signed_(words: Tensor) -> Tensor:
    """The finaliser in place with torch's own operations, on any device."""
    import torch

    scratch = torch.empty_like(words)

    def fold(shift: int) -> None:
        # Torch shifts copies of the sign bit in; the mask takes them out again.
        torch.bitwise_right_shift(words, shift, out=scratch)
        words.bitwise_xor_(scratch.bitwise_and_(WORD >> shift))

    for shift, factor in ROUNDS:
        fold(shift)
        words.mul_(signed(factor))
    fold(LAST_SHIFT)
    return words


def stream(seed: int) -> int:
    """The 64-bit key of a seed; seeds count modulo 2^64."""
    return finalise_int(seed + GOLDEN)


def hash_int(value: int, seed: int) -> int:
    """The hash of one id, 0 to 2^64 - 1."""
    key = stream(seed)
    return finalise_int(finalise_int(value + key) + key)


def hash_torch(values: Tensor, seed: int) -> Tensor:
    """The hashes of a tensor of ids, on its device, as the int64 with the same 64 bits."""
    key = signed(stream(seed))
    return finalise_torch_(finalise_torch_(values.long() + key).add_(key))


def rows_torch(values: Tensor, seed: int, rows: int) -> Tensor:
    """A table row in [0, rows) for each id, int64 on the device of the ids."""
    require_rows(rows)
    words = hash_torch(values, seed)
    return words.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF).mul_(rows).bitwise_right_shift_(32)


def require_rows(rows: int) -> None:
    if not 1 <= rows <= MOST_ROWS:
        raise ArgumentError(f"rows is {rows}; ids can be hashed to 1 to {MOST_ROWS} rows")


_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_LANES = 4
"""Words of the shortest key that xxh64 reads in lanes, which no key here is long enough for."""


def xxh64(keys: Sequence[NDArray[np.int64]], seed: int = 0) -> Words:
    """The hash of every key of one to three words: `keys` has the first words of all keys, then the second words, and
    so on, of equal shape. The bytes of a key are its words in order, little-endian."""
    if not 1 <= len(keys) < _LANES or any(key.shape != keys[0].shape for key in keys):
        raise ValueError("keys must have one to three words, and all of them equally many")
    hashed = np.full(keys[0].shape, (seed + _P5 + 8 * len(keys)) & WORD, np.uint64)
    for key in keys:
        word = np.ascontiguousarray(key, np.int64).view(np.uint64)
        hashed ^= _rotate(word * np.uint64(_P2), 31) * np.uint64(_P1)
        hashed = _rotate(hashed, 27) * np.uint64(_P1) + np.uint64(_P4)
    for shift, factor in ((33, _P2), (29, _P3)):
        hashed ^= hashed >> np.uint64(shift)
        hashed *= np.uint64(factor)
    hashed ^= hashed >> np.uint64(32)
    return hashed


def _rotate(words: Words, bits: int) -> Words:
    rotated = words << np.uint64(bits)
    rotated |= words >> np.uint64(64 - bits)
    return rotated
