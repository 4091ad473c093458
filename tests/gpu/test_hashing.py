from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recperf.data.random_clicks import RandomClicks
from recperf.ops import hashing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

EXTREMES = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32)])


@pytest.mark.parametrize("seed", [0, 1, 0xA5A5A5A5, -1, 2**63])
def test_a_gpu_hashes_as_a_cpu_does(seed: int) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-(2**63), 2**63 - 1, (98_304,), generator=generator)
    values = torch.cat([EXTREMES, torch.arange(-1000, 1000), values])
    assert torch.equal(hashing.hash_torch(values.cuda(), seed).cpu(), hashing.hash_torch(values, seed))
    assert hashing.hash_torch(EXTREMES.cuda(), seed).cpu().tolist() == [
        hashing.signed(hashing.hash_int(value, seed)) for value in EXTREMES.tolist()
    ]
    for rows in (1, 1682, 2_000_000, hashing.MOST_ROWS):
        found = hashing.rows_torch(values.cuda(), seed, rows)
        assert found.device.type == "cuda"
        assert torch.equal(found.cpu(), hashing.rows_torch(values, seed, rows))


@pytest.mark.parametrize("space", [1682, 2_000_000, 1 << 40])
def test_a_gpu_draws_the_clicks_a_cpu_draws(space: int) -> None:
    on_cpu = RandomClicks(
        keys=("a", "b", "c"),
        dense=16,
        batch_size=1024,
        batches_per_epoch=10,
        seed=3,
        ids="uniform",
        id_space=space,
        ids_per_bag=32,
    )
    mine, theirs = replace(on_cpu, device="cuda").batch(1, 2), on_cpu.batch(1, 2)
    assert mine.labels_B.device.type == mine.features.offsets_FB1.device.type == "cuda"
    assert torch.equal(mine.features.values_V.cpu(), theirs.features.values_V)
    assert torch.equal(mine.features.offsets_FB1.cpu(), theirs.features.offsets_FB1)
    assert torch.equal(mine.dense_BD.cpu(), theirs.dense_BD)
    assert float((mine.labels_B.cpu() != theirs.labels_B).float().mean()) < 0.005


def test_zipf_ids_of_a_gpu_are_those_of_a_cpu_but_for_rounding() -> None:
    on_cpu = RandomClicks(
        keys=("a",), dense=4, batch_size=8192, batches_per_epoch=1, seed=3, ids="zipf", id_space=2_000_000
    )
    mine, theirs = replace(on_cpu, device="cuda").batch(0, 0), on_cpu.batch(0, 0)
    assert float((mine.features.values_V.cpu() != theirs.features.values_V).float().mean()) < 0.001
