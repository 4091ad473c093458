"""The seeded hash by every implementation, xxh64 against the xxhash package, and the bits of dropout's written rule."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from recperf.ops import hashing
from recperf.ops.bag import native
from recperf.ops.dropout import Dropout, dropout_seed, keep_mask
from recperf.ops.hashing import hash_int, xxh64

INT64 = st.integers(-(2**63), 2**63 - 1)
EXTREMES = [0, 1, -1, 2, -2, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1]


def unsigned(values: torch.Tensor) -> list[int]:
    return [value % 2**64 for value in values.tolist()]


def test_the_finaliser_gives_the_published_splitmix64_sequence() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = [(index * hashing.GOLDEN) % 2**64 for index in (1, 2, 3)]
    signed = [hashing.signed(state) for state in states]
    assert [hashing.finalise_int(state) for state in states] == published
    assert hashing.finalise_numpy_(np.array(states, dtype=np.uint64)).tolist() == published
    assert unsigned(hashing.finalise_torch_(torch.tensor(signed))) == published
    assert unsigned(hashing.finalise_signed_(torch.tensor(signed))) == published


@given(st.lists(INT64, max_size=20), st.integers(-(2**64), 2**64), st.integers(1, hashing.MOST_ROWS))
def test_all_implementations_agree(values: list[int], seed: int, rows: int) -> None:
    values = values + EXTREMES
    tensor = torch.tensor(values)
    expected = [hashing.hash_int(value, seed) for value in values]
    assert unsigned(hashing.hash_torch(tensor, seed)) == expected
    expected_rows = [((word >> 32) * rows) >> 32 for word in expected]
    assert hashing.rows_torch(tensor, seed, rows).tolist() == expected_rows
    if not isinstance(native.library(), str):
        assert native.hash_rows(tensor, seed % 2**64, rows).tolist() == expected_rows
    assert tensor.tolist() == values, "the ids themselves were changed"


@given(
    st.integers(1, 3).flatmap(lambda words: st.lists(st.lists(INT64, min_size=words, max_size=words), min_size=1)),
    st.sampled_from([0, 1, (1 << 64) - 1, 0x9E3779B185EBCA87]),
)
def test_every_key_has_the_hash_of_the_package(keys: list[list[int]], seed: int) -> None:
    keys_BW = np.array(keys, np.int64)
    expected = [xxhash.xxh64_intdigest(key.astype("<i8").tobytes(), seed) for key in keys_BW]
    assert xxh64(list(keys_BW.T), seed).tolist() == expected


def test_words_the_package_once_gave() -> None:
    """Fixed numbers, so that they do not move together with the package."""
    assert int(xxh64([np.array([1])])[0]) == 0x9F29CB17A2A49995
    assert int(xxh64([np.array([1]), np.array([0])])[0]) != 0x9F29CB17A2A49995
    assert int(xxh64([np.array([1])], seed=1)[0]) != 0x9F29CB17A2A49995


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
