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
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ArgumentError
from .words import GOLDEN, LAST_SHIFT, ROUNDS, WORD, finalise_int, finalise_numpy_

MOST_ROWS = 1 << 31
"""(2^32 - 1) * 2^31 is the largest product of its kind that a signed word holds."""


def signed(word: int) -> int:
    """The int64 with the same 64 bits as the word."""
    word &= WORD
    return word - (1 << 64) if word >> 63 else word


def finalise_torch_(words: Tensor) -> Tensor:
    """The finaliser in place, on int64 words."""
    if words.device.type == "cpu":
        # numpy has the logical shift that torch lacks, which saves a third of the passes over memory.
        finalise_numpy_(words.numpy().view(np.uint64))
        return words
    return finalise_signed_(words)


def finalise_signed_(words: Tensor) -> Tensor:
    """The finaliser in place with torch's own operations, on any device."""
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


def hash_numpy(values: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """The hashes of an array of ids."""
    key, unsigned = np.uint64(stream(seed)), np.asarray(values, dtype=np.int64).view(np.uint64)
    words, scratch = np.empty_like(unsigned), np.empty_like(unsigned)
    finalise_numpy_(np.add(unsigned, key, out=words), scratch)
    return finalise_numpy_(np.add(words, key, out=words), scratch)


def hash_torch(values: Tensor, seed: int) -> Tensor:
    """The hashes of a tensor of ids, on its device, as the int64 with the same 64 bits."""
    if values.device.type == "cpu":
        return torch.from_numpy(hash_numpy(values.numpy(), seed).view(np.int64))
    return hash_signed(values, seed)


def hash_signed(values: Tensor, seed: int) -> Tensor:
    """`hash_torch` with torch's own operations, on any device."""
    key = signed(stream(seed))
    return finalise_signed_(finalise_signed_(values.to(torch.int64) + key).add_(key))


def rows_torch(values: Tensor, seed: int, rows: int) -> Tensor:
    """A table row in [0, rows) for each id, int64 on the device of the ids."""
    require_rows(rows)
    words = hash_torch(values, seed)
    return words.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF).mul_(rows).bitwise_right_shift_(32)


def require_rows(rows: int) -> None:
    if not 1 <= rows <= MOST_ROWS:
        raise ArgumentError(f"rows is {rows}; ids can be hashed to 1 to {MOST_ROWS} rows")
