"""The miss-ratio curve against a cache that is simulated row by row."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recperf.data.reuse import SIZES_D, Reuse
from recperf.models.tiers.cache import TieredRows
from recperf.models.tiers.config import TablesConfig
from recperf.models.tiers.store import HostRows
from recperf.ops.xxh64 import xxh64

Batches = list[NDArray[np.int64]]


def simulated(batches: Batches, slots: int) -> tuple[int, int]:
    """Uses, and misses of a cache that first places a batch's rows and then drops the least recently used ones."""
    cache: OrderedDict[int, None] = OrderedDict()
    hashes = xxh64([np.arange(max(int(rows_N.max()) for rows_N in batches) + 1)]).tolist()
    uses = misses = 0
    for rows_N in batches:
        for row in sorted(set(rows_N.tolist()) - set(cache)):
            misses += 1
            cache[row] = None
        for row in sorted(set(rows_N.tolist()), key=lambda row: int(hashes[row])):
            uses += 1
            cache.move_to_end(row)
        while len(cache) > slots:
            cache.popitem(last=False)
    return uses, misses


def zipf(rows: int, batches: int, batch: int, *, exponent: float, seed: int = 3) -> Batches:
    """Batches of ids by popularity, popular ids anywhere in the table."""
    generator = np.random.default_rng(seed)
    shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    names = generator.permutation(rows)
    return [names[np.searchsorted(shares, generator.random(batch) * shares[-1])] for _ in range(batches)]


def test_a_curve_of_all_rows_is_that_of_the_simulated_cache() -> None:
    """Of every size that is counted."""
    batches = zipf(900, 60, 150, exponent=0.8)
    reuse = Reuse([200, 700], followed=900)
    for rows_N in batches:
        reuse.add([rows_N[rows_N < 200], rows_N[rows_N >= 200] - 200])
    assert reuse.rate == 1.0
    assert reuse.uses == sum(len(np.unique(rows_N)) for rows_N in batches)
    for slots in (150, 160, 256, 300, 508, 900, 5000):
        assert slots in SIZES_D or slots >= 900
        uses, misses = simulated(batches, slots)
        assert reuse.misses(slots) == misses
        assert reuse.served(slots) == pytest.approx(1 - misses / uses)
        assert reuse.error(slots) == 0.0
    assert reuse.first == len(set(np.concatenate(batches).tolist()))
    slots = reuse.slots_for(0.5)
    assert slots is not None
    smaller = max(size for size in SIZES_D.tolist() if size < slots)
    assert reuse.served(slots) >= 0.5 > reuse.served(smaller)
    assert reuse.slots_for(1.0) is None


def test_a_sampled_curve_is_within_its_stated_error_and_its_memory_bounded() -> None:
    batches = zipf(200_000, 150, 4_000, exponent=0.9)
    exact, sampled = Reuse([200_000], followed=200_000), Reuse([200_000], followed=4_096)
    before = sampled.nbytes
    for rows_N in batches:
        exact.add([rows_N])
        sampled.add([rows_N])
        assert sampled.nbytes <= before + 4_096 * 16
    assert exact.rate == 1.0
    assert sampled.rate < 0.1
    assert sampled.uses == exact.uses
    for slots in (8_000, 16_000, 32_000, 64_000, 128_000):
        error = sampled.error(slots)
        assert 0 < error < 0.02
        assert abs(sampled.served(slots) - exact.served(slots)) < 3 * error
    assert all(a <= b for a, b in pairwise(sampled.served(slots) for slots in SIZES_D.tolist()))


@pytest.mark.parametrize("slots", [2_048, 8_192])
def test_the_cache_of_a_training_serves_and_moves_as_much_as_the_curve_says(slots: int) -> None:
    """Its rows leave in the order of their last use as well as a sample tells."""
    batches = zipf(20_000, 150, 1_000, exponent=0.9)
    reuse = Reuse([20_000])
    rows = TieredRows(
        {"t": 20_000}, HostRows(20_000, 3), dim=2, slots=slots, config=TablesConfig(), device=torch.device("cpu")
    )
    rows.initial = lambda name, rows_U: torch.zeros(len(rows_U), 2)
    for rows_N in batches:
        reuse.add([rows_N])
        rows.finish(rows.place({"t": torch.from_numpy(np.unique(rows_N))}, "test"))
    moved, misses = rows.traffic, reuse.misses(slots)
    assert moved.rows == reuse.uses
    assert moved.hits / moved.rows == pytest.approx(reuse.served(slots), abs=0.02)
    assert moved.fetched == pytest.approx(misses - reuse.first, abs=0.02 * moved.rows)
    assert moved.written_back == pytest.approx(misses - slots, abs=0.02 * moved.rows)
