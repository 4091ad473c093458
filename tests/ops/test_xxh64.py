"""The vectorised hash against the xxhash package."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from recperf.ops.xxh64 import xxh64

WORDS = st.integers(-(1 << 63), (1 << 63) - 1)


@given(
    st.integers(1, 13).flatmap(lambda words: st.lists(st.lists(WORDS, min_size=words, max_size=words), min_size=1)),
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
