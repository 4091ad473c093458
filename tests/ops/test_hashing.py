from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recperf.ops import hashing

INT64 = st.integers(-(2**63), 2**63 - 1)
EXTREMES = [0, 1, -1, 2, -2, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1]
SEEDS = [0, 1, 2, 0xA5A5A5A5, 0x5A5A5A5A, 0xC3C3C3C3, -1, 2**63]


def unevenness(counts: NDArray[np.int64]) -> float:
    """The chi-square statistic against equal chances, as a standard normal number (Wilson and Hilferty)."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5


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
    array, tensor = np.array(values, dtype=np.int64), torch.tensor(values)
    expected = [hashing.hash_int(value, seed) for value in values]
    assert hashing.hash_numpy(array, seed).tolist() == expected
    assert unsigned(hashing.hash_torch(tensor, seed)) == expected
    assert unsigned(hashing.hash_signed(tensor, seed)) == expected
    expected_rows = [hashing.rows_int(value, seed, rows) for value in values]
    assert 0 <= min(expected_rows) <= max(expected_rows) < rows
    assert hashing.rows_numpy(array, seed, rows).tolist() == expected_rows
    assert hashing.rows_torch(tensor, seed, rows).tolist() == expected_rows
    assert array.tolist() == tensor.tolist() == values, "the ids themselves were changed"


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_shapes_strides_and_narrow_ids_are_kept(shape: tuple[int, ...]) -> None:
    ids = torch.arange(-3, 3)[: int(np.prod(shape))].reshape(shape)
    for given_ids in (ids, ids.t() if len(shape) == 2 else ids, ids.int()):
        actual = hashing.hash_torch(given_ids, 5)
        assert actual.shape == given_ids.shape
        assert actual.dtype == torch.int64
        assert torch.equal(actual, hashing.hash_signed(given_ids, 5))
        assert unsigned(actual.reshape(-1)) == [hashing.hash_int(i, 5) for i in given_ids.reshape(-1).tolist()]


@pytest.mark.parametrize("seed", SEEDS[:3])
@pytest.mark.parametrize("rows", [1000, 1024])
@pytest.mark.parametrize("spacing", [1, 2**44])
def test_rows_are_uniform(seed: int, rows: int, spacing: int) -> None:
    ids = np.arange(-100_000, 100_000) * spacing
    counts = np.bincount(hashing.rows_numpy(ids, seed, rows), minlength=rows)
    assert abs(unevenness(counts)) < 4


@pytest.mark.parametrize("other", [1, 2, 2**32, 0x5A5A5A5A, -(2**63)])
def test_two_seeds_are_independent(other: int) -> None:
    ids, side = np.arange(200_000), 32
    joint = hashing.rows_numpy(ids, 0, side) * side + hashing.rows_numpy(ids, other, side)
    assert abs(unevenness(np.bincount(joint, minlength=side * side))) < 4


@pytest.mark.parametrize("seed", SEEDS)
def test_padding_and_complements_do_not_collide(seed: int) -> None:
    ids = np.arange(100_000)
    assert hashing.hash_int(-1, seed) != hashing.hash_int(0, seed)
    assert not (hashing.hash_numpy(ids, seed) == hashing.hash_numpy(~ids, seed)).any()
    shared_rows = (hashing.rows_numpy(ids, seed, 1000) == hashing.rows_numpy(~ids, seed, 1000)).mean()
    assert 0.0005 < shared_rows < 0.0015


def test_one_flipped_bit_flips_half_of_the_hash() -> None:
    ids = np.random.Generator(np.random.PCG64(0)).integers(-(2**63), 2**63, 2000)
    hashes = hashing.hash_numpy(ids, 9)
    for bit in range(64):
        flipped = hashing.hash_numpy(ids ^ np.uint64(1 << bit).astype(np.int64), 9)
        changed = np.bitwise_count(hashes ^ flipped)
        assert abs(changed.mean() - 32) < 5 * 4 / np.sqrt(len(ids))


@pytest.mark.parametrize("rows", [0, -1, 2**31 + 1])
def test_impossible_row_counts_are_refused(rows: int) -> None:
    for call in (
        lambda: hashing.rows_int(1, 0, rows),
        lambda: hashing.rows_numpy(np.arange(2), 0, rows),
        lambda: hashing.rows_torch(torch.arange(2), 0, rows),
    ):
        with pytest.raises(ValueError, match="ids can be hashed to 1 to"):
            call()
