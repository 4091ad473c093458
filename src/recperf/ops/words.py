"""64-bit hashes of integers and arrays of words, in numpy: the finaliser of splitmix64 (Steele, Lea, Flood 2014), and
xxh64 (Collet), bit for bit, for many short keys of whole 8-byte words. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

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


Words = NDArray[np.uint64]

_WORD = (1 << 64) - 1
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_LANES = 4
"""Words of a stripe: the hash reads longer keys in four lanes, one word each at a time."""


def xxh64(keys: Sequence[NDArray[np.int64]], seed: int = 0) -> NDArray[np.uint64]:
    """The hash of every key: `keys` has the first words of all keys, then the second words, and so on, of equal shape.

    The bytes of a key are its words in order, little-endian.
    """
    if not keys or any(key.shape != keys[0].shape for key in keys):
        raise ValueError("keys must have at least one word, and all of them equally many")
    shape = keys[0].shape
    words = [np.ascontiguousarray(key, np.int64).reshape(-1).view(np.uint64) for key in keys]
    hashed = np.full(words[0].shape, (seed + _P5) & _WORD, np.uint64)
    striped = len(words) // _LANES * _LANES
    if striped:
        hashed = _stripes(words[:striped], seed)
    hashed += np.uint64(8 * len(words))
    for word in words[striped:]:
        hashed ^= _round(None, word)
        hashed = _rotate(hashed, 27) * np.uint64(_P1) + np.uint64(_P4)
    for shift, factor in ((33, _P2), (29, _P3)):
        hashed ^= hashed >> np.uint64(shift)
        hashed *= np.uint64(factor)
    hashed ^= hashed >> np.uint64(32)
    return hashed.reshape(shape)


def _stripes(words: list[Words], seed: int) -> Words:
    starts = (seed + _P1 + _P2, seed + _P2, seed, seed - _P1)
    lanes = [np.full(words[0].shape, start & _WORD, np.uint64) for start in starts]
    for place, word in enumerate(words):
        lanes[place % _LANES] = _round(lanes[place % _LANES], word)
    hashed = np.zeros(words[0].shape, np.uint64)
    for lane, turn in zip(lanes, (1, 7, 12, 18)):
        hashed += _rotate(lane, turn)
    for lane in lanes:
        hashed ^= _round(None, lane)
        hashed = hashed * np.uint64(_P1) + np.uint64(_P4)
    return hashed


def _round(lane: Words | None, word: Words) -> Words:
    mixed = word * np.uint64(_P2)
    if lane is not None:
        mixed += lane
    mixed = _rotate(mixed, 31)
    mixed *= np.uint64(_P1)
    return mixed


def _rotate(words: Words, bits: int) -> Words:
    rotated = words << np.uint64(bits)
    rotated |= words >> np.uint64(64 - bits)
    return rotated
