"""Parses blocks of Criteo lines to arrays with numpy, without a Python step per line or field.

Every byte is first translated to a code (the value of a hexadecimal digit, or a mark). Each field is then the eight
bytes up to its end, loaded as one 64-bit word in which the bytes of other fields are masked. Digits are combined within
the words, first pairs, then fours, then eights.

Shapes: N valid lines, M lines, C = 40 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...ops.hashing import stream
from ...ops.splitmix import finalise_numpy_
from .config import DENSE, SPARSE
from .lines import COLUMNS, MOST_DIGITS, MOST_HEX

Words = NDArray[np.uint64]
Places = NDArray[np.int64]

_NOTHING, _MINUS, _RETURN, _TAB, _END = 0x80, 0x90, 0xA0, 0xFE, 0xFF
_FRONT = b"0" * 16
"""Padding before the first field, so that its words can be loaded."""
_MARKED = np.uint64(0x8080808080808080)
_DECIMAL = (10, 100, 10_000)
_SMALL = 1 << 16
_LOGS = np.log1p(np.arange(_SMALL, dtype=np.float64)).astype(np.float32)


def _code_table() -> bytes:
    table = bytearray([_NOTHING]) * 256
    for value, digit in enumerate(b"0123456789abcdef"):
        table[digit] = table[ord(chr(digit).upper())] = value
    table[ord("-")], table[ord("\r")], table[ord("\t")], table[ord("\n")] = _MINUS, _RETURN, _TAB, _END
    return bytes(table)


_CODES = _code_table()
# The first character of a field is the lowest byte of its word; a field of k characters fills the k highest bytes.
_MASKS = np.array([0] + [(1 << 64) - (1 << (8 * (8 - length))) for length in range(1, 9)], dtype=np.uint64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Parsed:
    labels_N: NDArray[np.uint8]
    dense_ND: NDArray[np.float32]
    """log(1 + max(x, 0)); a missing number is 0."""
    ids_NF: NDArray[np.int32]
    """Hashed to 1 .. rows - 1; a missing category is 0."""
    ends_N: Places
    """Position in the text after each valid line and its line feed."""
    bad: tuple[tuple[int, bytes], ...]
    """Number within the block, from 0, and text of each malformed line."""
    lines: int


class Parser:
    """Turns text into arrays; holds what the settings decide."""

    def __init__(self, table_rows: tuple[int, ...], hash_seed: int) -> None:
        self.keys_F = np.array([stream(hash_seed * 64 + feature) for feature in range(SPARSE)], dtype=np.uint64)
        self.spans_F = np.array(table_rows, dtype=np.uint64) - np.uint64(1)

    def parse(self, text: bytes) -> Parsed:
        """Parse whole lines, each with its line feed."""
        codes = np.frombuffer((_FRONT + text).translate(_CODES), dtype=np.uint8)
        starts_M, feeds_M, ends_NC, whole_M = _split(codes)
        starts_NC = np.empty_like(ends_NC)
        starts_NC[:, 0] = starts_M if whole_M is None else starts_M[whole_M]
        np.add(ends_NC[:, :-1], 1, out=starts_NC[:, 1:])
        line_ends_N = ends_NC[:, -1] + 1
        ends_NC[:, -1] -= codes[ends_NC[:, -1] - 1] == _RETURN
        lengths_NC = ends_NC - starts_NC

        first_N = codes[starts_NC[:, 0]]
        good_N = (first_N <= 1) & (lengths_NC[:, 0] == 1)
        numbers, categories = slice(1, 1 + DENSE), slice(1 + DENSE, COLUMNS)
        values_ND = _integers(codes, ends_NC[:, numbers], lengths_NC[:, numbers], good_N)
        hexes_NF = _hexes(codes, ends_NC[:, categories], lengths_NC[:, categories], good_N)
        dense_ND = _logs(values_ND)
        ids_NF = self._hash(hexes_NF, lengths_NC[:, categories])
        if whole_M is None and good_N.all():
            return Parsed(
                labels_N=first_N, dense_ND=dense_ND, ids_NF=ids_NF, ends_N=line_ends_N - len(_FRONT), bad=(),
                lines=len(feeds_M),
            )  # fmt: skip
        refused_M = np.ones(len(feeds_M), dtype=np.bool_)
        refused_M[np.flatnonzero(good_N) if whole_M is None else np.flatnonzero(whole_M)[good_N]] = False
        shift = len(_FRONT)
        bad = tuple((int(m), text[starts_M[m] - shift : feeds_M[m] - shift]) for m in np.flatnonzero(refused_M))
        return Parsed(
            labels_N=first_N[good_N],
            dense_ND=dense_ND[good_N],
            ids_NF=ids_NF[good_N],
            ends_N=line_ends_N[good_N] - shift,
            bad=bad,
            lines=len(feeds_M),
        )

    def _hash(self, values_NF: Words, lengths_NF: Places) -> NDArray[np.int32]:
        """`rows_numpy` of hashing.py for every feature at once, each with its own key and number of rows."""
        scratch = np.empty_like(values_NF)
        finalise_numpy_(np.add(values_NF, self.keys_F, out=values_NF), scratch)
        finalise_numpy_(np.add(values_NF, self.keys_F, out=values_NF), scratch)
        np.right_shift(values_NF, np.uint64(32), out=values_NF)
        np.multiply(values_NF, self.spans_F, out=values_NF)
        np.right_shift(values_NF, np.uint64(32), out=values_NF)
        ids_NF = values_NF.astype(np.int32)
        ids_NF += 1
        ids_NF *= lengths_NF > 0
        return ids_NF


def _split(codes: NDArray[np.uint8]) -> tuple[Places, Places, Places, NDArray[np.bool_] | None]:
    """Starts of the lines, their line feeds, ends of the fields of lines with 40 columns, and a mask of those lines,
    which is None if all have 40."""
    marks, feeds_M = np.flatnonzero(codes >= _TAB), np.flatnonzero(codes == _END)
    starts_M = np.concatenate([np.array([len(_FRONT)]), feeds_M[:-1] + 1])
    if len(marks) == COLUMNS * len(feeds_M) and np.array_equal(marks[COLUMNS - 1 :: COLUMNS], feeds_M):
        return starts_M, feeds_M, marks.reshape(-1, COLUMNS), None
    columns_M = np.diff(np.searchsorted(marks, feeds_M), prepend=-1)
    whole_M = columns_M == COLUMNS
    return starts_M, feeds_M, marks[np.repeat(whole_M, columns_M)].reshape(-1, COLUMNS), whole_M


def _words(codes: NDArray[np.uint8], ends: Places, lengths: Places) -> Words:
    """The last eight characters of each field; characters before its start are 0."""
    shape = (len(codes) - 7,)
    anywhere = np.lib.stride_tricks.as_strided(codes[: len(codes) // 8 * 8].view("<u8"), shape=shape, strides=(1,))
    words: Words = anywhere[ends - 8]
    words &= _MASKS.take(lengths, mode="clip")
    return words


def _hexes(codes: NDArray[np.uint8], ends_NF: Places, lengths_NF: Places, good_N: NDArray[np.bool_]) -> Words:
    words_NF = _words(codes, ends_NF, lengths_NF)
    # Check the whole block first: it is usually valid, and a check per line is slower.
    if np.bitwise_or.reduce(words_NF, axis=None) & _MARKED or lengths_NF.max(initial=0) > MOST_HEX:
        good_N &= ((words_NF & _MARKED == 0) & (lengths_NF <= MOST_HEX)).all(axis=1)
    return _join(words_NF, np.left_shift, (4, 8, 16))


def _integers(codes: NDArray[np.uint8], ends_ND: Places, lengths_ND: Places, good_N: NDArray[np.bool_]) -> Words:
    """max(x, 0) of integers; a missing one gives 0."""
    words_ND = _words(codes, ends_ND, lengths_ND)
    odd_ND = _not_decimal(words_ND)
    odd_ND |= lengths_ND > 8
    odd = np.nonzero(odd_ND)
    values_ND = _join(words_ND, np.multiply, _DECIMAL)
    if len(odd[0]):
        values, fine = _odd_integers(codes, ends_ND[odd], lengths_ND[odd])
        values_ND[odd] = values
        good_N[odd[0][~fine]] = False
    return values_ND


def _odd_integers(codes: NDArray[np.uint8], ends: Places, lengths: Places) -> tuple[Words, NDArray[np.bool_]]:
    """Integers that are negative, longer than a word, or malformed; and a mask of the valid ones."""
    negative = codes[ends - lengths] == _MINUS
    digits = lengths - negative
    low, high = _words(codes, ends, digits), _words(codes, ends - 8, np.maximum(digits - 8, 0))
    fine = (digits >= 1) & (digits <= MOST_DIGITS) & ~_not_decimal(low) & ~_not_decimal(high)
    values = _join(low, np.multiply, _DECIMAL) + _join(high, np.multiply, _DECIMAL) * np.uint64(100_000_000)
    values[negative] = 0
    return values, fine


def _not_decimal(words: Words) -> NDArray[np.bool_]:
    wrong: NDArray[np.bool_] = ((words + np.uint64(0x0606060606060606)) & np.uint64(0xF0F0F0F0F0F0F0F0)) != 0
    return wrong


def _join(words: Words, scale: np.ufunc, weights: tuple[int, int, int]) -> Words:
    """Combine the eight digits of each word into a number, in place: pairs of digits with the first weight, pairs of
    those with the second, and so on."""
    scratch = np.empty_like(words)
    masks = (0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0x00000000FFFFFFFF)
    for weight, shift, mask in zip(weights, (8, 16, 32), masks):
        np.right_shift(words, np.uint64(shift), out=scratch)
        scale(words, np.uint64(weight), out=words)
        np.add(words, scratch, out=words)
        np.bitwise_and(words, np.uint64(mask), out=words)
    return words


def _logs(values_ND: Words) -> NDArray[np.float32]:
    """log(1 + x), rounded once from double precision, so that the bits do not depend on the position in a block."""
    logs_ND = _LOGS.take(values_ND.view(np.int64), mode="clip")
    large_ND = values_ND >= _SMALL
    if large_ND.any():
        logs_ND[large_ND] = np.log1p(values_ND[large_ND].astype(np.float64)).astype(np.float32)
    return logs_ND
