"""The implementations of the draw against the reference, and against plain integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recperf.data.batch import ClickBatch
from recperf.data.config import RandomBagsConfig
from recperf.data.order import WHOLE, RankShare
from recperf.data.random_bags import RandomBags
from recperf.ops.draw import FAST_KINDS, MULTIPLIERS

FAST = ["native", "triton"]
SHAPES: dict[str, dict[str, Any]] = {
    "odd": {"rows": (4, 1000, 37), "ids_per_bag": 6, "dense": 37, "batch_size": 50},
    "all sizes 1": {"rows": (1,), "ids_per_bag": 1, "dense": 1, "batch_size": 1},
    "long bags": {"rows": (300, 1 << 31), "ids_per_bag": 150, "dense": 3, "batch_size": 5},
    "own lengths": {"rows": (500, 3, 90), "ids_per_feature": (3, 7, 70), "dense": 16, "batch_size": 21},
    "wide": {"rows": (2, 3), "ids_per_bag": 2, "dense": 1030, "batch_size": 3},
}


def source(implementation: Any, ids: Any = "uniform", **changes: Any) -> RandomBags:
    changes = SHAPES["odd"] | {"seed": 5, "rank_share": WHOLE} | changes
    shape = {name: changes.pop(name) for name in ("rows", "dense", "batch_size", "seed", "rank_share")}
    config = RandomBagsConfig(ids=ids, batches=1000, **changes)
    keys = tuple("abcdef"[: len(shape["rows"])])
    return RandomBags(keys=keys, implementation=implementation, config=config, **shape)


def poisoned(random: RandomBags) -> ClickBatch:
    """Buffers in which a number that is not written would be noticed."""
    batch = random.buffers()
    for tensor in (batch.dense_BD, batch.labels_B):
        tensor.fill_(torch.nan)
    for tensor in (batch.features.values_V, batch.features.offsets_FB1):
        tensor.fill_(-7)
    return batch


def agree(implementation: str, index: int, **changes: Any) -> None:
    batches = []
    for name in ("reference", implementation):
        random = source(name, **changes)
        batches.append(poisoned(random))
        random.draw(torch.tensor([index]), batches[-1])
    expected, actual = batches
    used = int(expected.features.offsets_FB1[-1])
    assert torch.equal(actual.features.offsets_FB1, expected.features.offsets_FB1)
    assert torch.equal(actual.dense_BD, expected.dense_BD)
    assert torch.equal(actual.features.values_V[:used], expected.features.values_V[:used])
    assert torch.equal(actual.labels_B, expected.labels_B)
    assert actual.dense_BD.isfinite().all()
    assert set(actual.labels_B.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("ids", FAST_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", FAST)
def test_implementations_agree(implementation: str, shape: str, ids: str) -> None:
    # One batch per shape for the interpreter, which is slow.
    cases = [(-3, shape in ("wide", "long bags"))] if implementation == "triton" else [(0, False), (1 << 40, True)]
    for index, fixed in cases:
        agree(implementation, index, ids=ids, fixed=fixed, **SHAPES[shape])


@pytest.mark.parametrize("ids", FAST_KINDS)
@pytest.mark.parametrize("rows", [(4, 3, 2), (8, 1, 1000)])
@pytest.mark.parametrize("implementation", FAST)
def test_implementations_drop_the_same_repeats(implementation: str, rows: tuple[int, ...], ids: str) -> None:
    shape = {"rows": rows, "ids_per_bag": 8, "batch_size": 33, "dense": 4}
    for fixed in (False,) if implementation == "triton" else (False, True):
        agree(implementation, 1, ids=ids, distinct=True, fixed=fixed, **shape)


@pytest.mark.parametrize("shape", ["odd", "own lengths"])
@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_a_part_of_a_batch_has_the_bits_of_the_whole(implementation: str, shape: str) -> None:
    options = SHAPES[shape] | {"distinct": shape == "odd", "batch_size": 7}
    whole = source(implementation, **options).batch(0, 3)
    for rank in range(3):
        part = source(implementation, rank_share=RankShare(rank, 3), **options).batch(0, 3)
        these = list(range(rank, 7, 3))
        assert torch.equal(part.dense_BD, whole.dense_BD[these])
        assert torch.equal(part.labels_B, whole.labels_B[these])
        for key in whole.features.keys:
            (ids, edges), (own, own_edges) = whole.features[key], part.features[key]
            expected = [ids[edges[sample] : edges[sample + 1]].tolist() for sample in these]
            assert [own[first:last].tolist() for first, last in zip(own_edges, own_edges[1:])] == expected


def mix_int(word: int) -> int:
    for shift, factor in ((16, MULTIPLIERS[0]), (15, MULTIPLIERS[1])):
        word = ((word ^ (word >> shift)) * factor) & 0xFFFFFFFF
    return word ^ (word >> 16)


def test_ids_and_dense_features_are_those_of_their_counters() -> None:
    """Against plain integers: feature 1, sample 5, place 2; and dense feature 3 of sample 7."""
    random = source("reference", rows=(8, 1000), ids_per_bag=4, fixed=True)
    batch, (first, second) = random.batch(0, 6), random.plan.keys(6)

    def word(counter: int) -> int:
        return mix_int((mix_int(counter ^ first) + second) & 0xFFFFFFFF)

    assert batch.features["b"][0].view(50, 4)[5, 2] == word(50 * 4 + 5 * 4 + 2) * 1000 >> 32
    drawn = word(50 * 8 + 7 * 37 + 3) >> 8
    signed = drawn - (1 << 24) if drawn >> 23 else drawn
    assert float(batch.dense_BD[7, 3]) == pytest.approx(signed * 2**-23 * 3**0.5, rel=1e-7)
