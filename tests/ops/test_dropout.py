"""Dropout: the bits of the written rule. The tests of `assemble` and `stu_output` compare their kernels with these."""

from __future__ import annotations

from recperf.ops.dropout import Dropout, dropout_seed, keep_mask
from recperf.ops.hashing import hash_int


def mix_int(word: int) -> int:
    word = (word ^ (word >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    word = (word ^ (word >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return word ^ (word >> 16)


def word_int(seed: int, row: int, column: int) -> int:
    """The rule once more, in integers."""
    hashed = hash_int(seed, 0x64726F70)
    first, second = hashed & 0xFFFFFFFF, hashed >> 32
    a = mix_int((mix_int((row & 0xFFFFFFFF) ^ first) + second) & 0xFFFFFFFF)
    b = mix_int(a ^ second)
    x = (column * 0x9E3779B1 + a) & 0xFFFFFFFF
    x = (x ^ (x >> 16) ^ b) * 0x7FEB352D & 0xFFFFFFFF
    return (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF


def test_the_mask_is_what_the_rule_says() -> None:
    rate = 0.93
    dropout = Dropout(rate, seed=77)
    expected = [[word_int(77, row, column) >= rate * 2**32 for column in range(50)] for row in range(20)]
    assert keep_mask(dropout, 20, 50, "cpu").tolist() == expected


def test_seeds_do_not_change_from_release_to_release() -> None:
    """A resumed run must drop what the interrupted one would have."""
    assert dropout_seed(1, 2, 3, "output") == 4807087395884125185
    assert keep_mask(Dropout(0.5, 1), 2, 8, "cpu").int().tolist() == [
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 1, 0, 0],
    ]
