"""Batches drawn and ids hashed on a GPU are those of a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from recperf.data.batch import ClickBatch
from recperf.data.config import RandomBagsConfig
from recperf.data.random_bags import RandomBags
from recperf.ops import hashing
from recperf.ops.draw import FAST_KINDS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

SOURCES: dict[str, dict[str, Any]] = {
    "experiment": {"rows": (4, 3, 2), "ids_per_bag": 10, "distinct": True},
    "intended": {"rows": (1_000_000,) * 8, "ids_per_bag": 100},
    "lengths per feature": {"rows": (40_000_000, 3, 900, 17), "ids_per_feature": (3, 1, 100, 27), "fixed": True},
    "odd": {"rows": (5, 1001), "ids_per_bag": 5, "batch_size": 777, "dense": 13},
    "gaussian": {"rows": (1_000_000, 40_000_000), "ids_per_bag": 20, "ids": "gaussian"},
    "shared id space": {"id_space": 1 << 40, "ids_per_bag": 32},
    "zipf": {"rows": (1_000_000, 40_000_000), "ids_per_bag": 20, "ids": "zipf"},
    "zipf, distinct": {"rows": (1_000_000, 7), "ids_per_bag": 8, "ids": "zipf", "exponent": 2.0, "distinct": True},
}


@pytest.fixture(params=SOURCES)
def random(request: pytest.FixtureRequest) -> RandomBags:
    fields = dict(SOURCES[request.param])
    shape = {"dense": 512, "batch_size": 2048} | {
        name: fields.pop(name) for name in ("rows", "id_space", "dense", "batch_size") if name in fields
    }
    keys = tuple(f"t{index}" for index in range(len(shape.get("rows", "abc"))))
    return RandomBags(keys=keys, seed=3, device="cuda", config=RandomBagsConfig(**fields), **shape)


def assert_same(actual: ClickBatch, expected: ClickBatch, random: RandomBags) -> None:
    used = int(expected.features.offsets_FB1[-1])
    exact = random.config.ids == "uniform"
    assert torch.equal(actual.dense_BD.cpu(), expected.dense_BD.cpu())
    differ = (actual.features.values_V[:used].cpu() != expected.features.values_V[:used].cpu()).double().mean()
    assert float(differ) <= (0.0 if exact else 1e-3)
    if exact or not random.config.distinct:
        assert torch.equal(actual.features.offsets_FB1.cpu(), expected.features.offsets_FB1.cpu())
    assert float((actual.labels_B.cpu() != expected.labels_B.cpu()).double().mean()) <= 5e-3


@pytest.mark.parametrize("other", ["reference on a GPU", "reference on a CPU", "auto on a CPU"])
def test_every_implementation_draws_the_same(random: RandomBags, other: str) -> None:
    fast = random.id_space is None and random.config.ids in FAST_KINDS
    assert random.why.startswith("triton: " if fast else "reference: ")
    name, _, place = other.partition(" on a ")
    theirs = replace(random, implementation=name, device={"GPU": "cuda", "CPU": "cpu"}[place])  # type: ignore[arg-type]
    for step in (0, 7):
        assert_same(random.batch(2, step), theirs.batch(2, step), random)
    assert_same(next(random.held_out(1)), next(theirs.held_out(1)), random)


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
        actual = hashing.rows_torch(values.cuda(), seed, rows)
        assert actual.device.type == "cuda"
        assert torch.equal(actual.cpu(), hashing.rows_torch(values, seed, rows))
