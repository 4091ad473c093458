"""Every implementation of the bag against the reference, on odd shapes."""

from __future__ import annotations

import pytest
import torch

from recperf.data.hashing import rows_int
from recperf.errors import MachineError
from recperf.ops.bag import choose, native, reference

needs_native = pytest.mark.skipif(isinstance(native.library(), str), reason=str(native.library()))

LENGTHS = {
    "one each": [1] * 63,
    "empty rows": [0, 3, 0, 0, 5, 1, 0],
    "all empty": [0, 0, 0],
    "no bags": [],
    "one bag of one": [1],
    "long": [63, 1, 200, 0, 64],
    "many": [17] * 200,
}


def batch(lengths: list[int], rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(len(lengths) + dim)
    table = torch.randn(rows, dim, generator=draw)
    ids = torch.randint(0, rows, (sum(lengths),), generator=draw)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    gradient = torch.randn(len(lengths), dim, generator=draw)
    return table, ids, offsets, gradient


@needs_native
@pytest.mark.parametrize("rows", [1, 97, 2_000_000, 1 << 31])
def test_ids_hash_to_the_same_rows(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    ids = torch.randint(-(1 << 62), 1 << 62, (5000,), generator=draw)
    ids[:5] = torch.tensor([0, -1, 1, (1 << 63) - 1, -(1 << 63)])
    for seed in (0, 1, 0xA5A5A5A5, (1 << 64) - 1):
        found = native.hash_rows(ids, seed, rows)
        assert torch.equal(found, reference.hash_rows(ids, seed, rows))
        assert int(found[1]) == rows_int(-1, seed, rows)


@needs_native
@pytest.mark.parametrize("dim", [1, 7, 64, 100])
@pytest.mark.parametrize("rows", [1, 5, 5000])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
def test_sums_agree(lengths: list[int], rows: int, dim: int) -> None:
    table, ids, offsets, _ = batch(lengths, rows, dim)
    if not lengths:
        assert native.bag_sum(table, ids, offsets).shape == (0, dim)
        return
    expected = reference.bag_sum(table, ids, offsets)
    torch.testing.assert_close(native.bag_sum(table, ids, offsets), expected, rtol=1e-5, atol=1e-5)


@needs_native
@pytest.mark.parametrize("adagrad", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 5000])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
def test_updates_agree(lengths: list[int], rows: int, adagrad: bool) -> None:
    table, ids, offsets, gradient = batch(lengths, rows, 12)
    found = []
    for implementation in (reference, native):
        weights, state = table.clone(), torch.rand(rows, generator=torch.Generator().manual_seed(1))
        grouped = implementation.Grouped(ids, offsets, rows)
        for _ in range(2):
            implementation.update(
                weights, state if adagrad else None, grouped, gradient, rate=0.1, eps=1e-8, decay=0.2, scale=0.5
            )
        found.append((weights, state, torch.tensor(implementation.squared_norm(grouped, gradient)), grouped.unique))
    for expected, got in zip(*found):
        if isinstance(expected, int):
            assert expected == got
        else:
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, check_dtype=False)
    untouched = torch.ones(rows, dtype=torch.bool)
    untouched[ids] = False
    assert torch.equal(found[1][0][untouched], table[untouched])


def test_row_wise_adagrad_is_what_it_says() -> None:
    table = torch.ones(4, 2)
    state = torch.zeros(4)
    grouped = reference.Grouped(torch.tensor([2, 0, 2]), torch.tensor([0, 2, 3]), 4)
    gradient = torch.tensor([[1.0, 3.0], [2.0, 1.0]])
    reference.update(table, state, grouped, gradient, rate=0.1, eps=0.0, decay=0.0, scale=1.0)
    assert state.tolist() == [5.0, 0.0, 12.5, 0.0]
    torch.testing.assert_close(table[2], 1 - 0.1 * torch.tensor([3.0, 4.0]) / 12.5**0.5)
    torch.testing.assert_close(table[0], 1 - 0.1 * torch.tensor([1.0, 3.0]) / 5**0.5)


@needs_native
def test_any_number_of_threads_gives_the_same_bits() -> None:
    table, ids, offsets, gradient = batch([9] * 3000, 700, 16)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            weights, state = table.clone(), torch.zeros(700)
            grouped = native.Grouped(ids, offsets, 700)
            native.update(weights, state, grouped, gradient, rate=0.1, eps=1e-8, decay=0.0, scale=1.0)
            results.append((native.bag_sum(table, ids, offsets), weights, state))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@needs_native
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_shared_by_many_ids_are_cut_between_rows(rows: int) -> None:
    ids = torch.arange(6000) % rows
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        grouped = native.Grouped(ids, torch.arange(0, 6001, 2), rows)
    finally:
        torch.set_num_threads(threads)
    ordered = ids[grouped.order_V.long()].tolist()
    assert grouped.cuts[0] == 0
    assert grouped.cuts[-1] == 6000
    assert grouped.cuts == sorted(grouped.cuts)
    for cut in grouped.cuts[1:-1]:
        assert cut in (0, 6000) or ordered[cut - 1] != ordered[cut]


def test_the_choice_is_explained_and_a_wish_that_cannot_be_met_is_an_error() -> None:
    half = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert choose("auto", half)[1].startswith("reference: the table is torch.bfloat16")
    with pytest.raises(MachineError, match="native bag cannot be used"):
        choose("native", half)
    assert choose("reference", torch.zeros(2, 2))[0] is reference


def test_without_a_compiler_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: None)
    try:
        assert choose("auto", torch.zeros(2, 2)) == (reference, "reference: no C compiler on this machine")
    finally:
        native.library.cache_clear()
