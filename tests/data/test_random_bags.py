from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recperf.data.batch import ClickBatch
from recperf.data.config import RandomBagsConfig
from recperf.data.random_bags import RandomBags
from recperf.errors import ConfigError
from recperf.train.metrics import auc

KINDS = ["uniform", "gaussian", "zipf"]
ROWS = (4, 1000, 37)


def bags(**changes: Any) -> RandomBags:
    config = {name: changes.pop(name) for name in list(changes) if name in RandomBagsConfig.__dataclass_fields__}
    config = {"ids_per_bag": 6, "batches": 4, "held_out_batches": 2} | config
    tables = {} if "id_space" in changes else {"rows": ROWS}
    fields = {"keys": ("a", "b", "c"), "dense": 5, "batch_size": 32, "seed": 7} | tables | changes
    return RandomBags(config=RandomBagsConfig(**config), **fields)


SHARED = {"id_space": 10_000}
SOURCES: list[dict[str, Any]] = [*({"ids": ids} for ids in KINDS), SHARED, SHARED | {"ids": "zipf"}]
"""Every kind of ids from a table per feature, and those of an id space that features share."""


def same(one: ClickBatch, other: ClickBatch) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in (
            (one.dense_BD, other.dense_BD),
            (one.features.values_V, other.features.values_V),
            (one.features.offsets_FB1, other.features.offsets_FB1),
            (one.labels_B, other.labels_B),
        )
    )


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_batch_depends_on_seed_epoch_and_step_only(source: dict[str, Any]) -> None:
    expected = bags(**source).batch(2, 3)
    torch.manual_seed(5)
    fresh = bags(**source)
    list(fresh.batches(0))
    list(fresh.held_out(2))
    assert same(fresh.batch(2, 3), expected)
    assert same(list(fresh.batches(2))[3], expected)
    assert same(next(fresh.batches(2, start=3)), expected)
    assert len(fresh) == 4


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("ids", KINDS)
def test_shapes_types_and_ranges(ids: str, fixed: bool) -> None:
    batch = bags(ids=ids, fixed=fixed).batch(0, 0)
    features = batch.features
    assert batch.dense_BD.shape == (32, 5)
    assert batch.dense_BD.dtype == batch.labels_B.dtype == torch.float32
    assert features.values_V.dtype == features.offsets_FB1.dtype == torch.int64
    assert set(batch.labels_B.tolist()) == {0.0, 1.0}
    assert not features.one_id_a_bag
    for key, rows in zip(features.keys, ROWS):
        values, offsets = features[key]
        lengths, most = offsets.diff(), min(rows, 6)
        assert int(values.min()) >= 0
        assert int(values.max()) < rows
        assert int(offsets[-1]) == values.numel() == int(lengths.sum())
        assert set(lengths.tolist()) <= set([most] if fixed else range(1, most + 1))
        assert fixed or len(set(lengths.tolist())) > 2
    assert features.values_V.numel() == int(features.offsets_FB1[-1])


def test_lengths_are_those_of_the_public_generator() -> None:
    """round(max(1, u * 6)): 1.5 sixths are 1, one sixth each 2 to 5, half a sixth 6."""
    lengths = bags(batch_size=6000, rows=(10,) * 3).batch(0, 0).features.offsets_FB1.diff()
    shares = torch.bincount(lengths, minlength=7).double() / lengths.numel()
    expected = torch.tensor([0, 1.5, 1, 1, 1, 1, 0.5], dtype=torch.float64) / 6
    assert float((shares - expected).abs().max()) < 0.012


def test_each_feature_may_have_its_own_maximum_length() -> None:
    features = bags(ids_per_feature=(3, 2, 1), fixed=True).batch(0, 0).features
    assert features.ids_per_key == (96, 64, 32)
    assert bags(ids_per_feature=(1, 1, 1)).batch(0, 0).features.one_id_a_bag
    with pytest.raises(ConfigError, match="one number for each of the 3 features"):
        bags(ids_per_feature=(1, 2))


@pytest.mark.parametrize("ids", KINDS)
def test_distinct_drops_repeats_and_nothing_else(ids: str) -> None:
    with_repeats = bags(ids=ids).batch(0, 0)
    without = bags(ids=ids, distinct=True).batch(0, 0)
    assert torch.equal(with_repeats.dense_BD, without.dense_BD)
    dropped = 0
    for key in without.features.keys:
        bags_of = []
        for batch in (with_repeats, without):
            values, offsets = batch.features[key]
            bags_of.append([values[a:b].tolist() for a, b in zip(offsets.tolist(), offsets[1:].tolist())])
        for repeated, unique in zip(*bags_of):
            assert unique == list(dict.fromkeys(repeated))
            dropped += len(repeated) - len(unique)
    assert dropped > 0


@pytest.mark.parametrize("space", [1, 2, 3, 1000, 1 << 40, (1 << 40) - 1])
@pytest.mark.parametrize("ids", ["uniform", "zipf"])
def test_small_and_large_shared_id_spaces(space: int, ids: str) -> None:
    values = bags(id_space=space, ids=ids, batch_size=4096).batch(0, 0).features.values_V
    assert 0 <= values.min() <= values.max() < space
    assert values.unique().numel() >= min(space, 1000 if ids == "uniform" else 900)
    if space > 1000:
        assert values.max() > 0.9 * space
        popular, counts = values.unique(return_counts=True)
        assert ids == "uniform" or popular[counts.topk(50).indices].sort().values.diff().min() > 1000


@pytest.mark.parametrize("source", [{"rows": (1000,) * 3}, {"id_space": 1000}], ids=["tables", "shared id space"])
@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.05, 2.0])
def test_zipf_ids_follow_the_power_law(exponent: float, source: dict[str, Any]) -> None:
    rows = 1000
    random = bags(ids="zipf", exponent=exponent, batch_size=20_000, fixed=True, **source)
    values = random.batch(0, 0).features["b"][0]
    popular = torch.bincount(values, minlength=rows).sort(descending=True).values.double() / values.numel()
    # The cell of rank k is the integral of x^-exponent from k - 1/2 to k + 1/2.
    edges = torch.arange(0, rows + 1, dtype=torch.float64) + 0.5
    integral = edges.log() if exponent == 1.0 else edges ** (1 - exponent) / (1 - exponent)
    expected = integral.diff() / integral.diff().sum()
    for rank in (0, 1, 2, 5):
        assert math.isclose(float(popular[rank]), float(expected[rank]), rel_tol=0.06), rank
    assert math.isclose(float(popular[:100].sum()), float(expected[:100].sum()), rel_tol=0.02)


@pytest.mark.parametrize("source", [{}, {"distinct": True}, SHARED], ids=["tables", "distinct", "shared id space"])
def test_labels_are_drawn_from_the_planted_odds(source: dict[str, Any]) -> None:
    random = bags(batch_size=20_000, **source)
    batch = random.batch(0, 0)
    logits = random.planted_logits(batch)
    chances = logits.sigmoid()
    assert abs(float(batch.labels_B.mean() - chances.mean())) < 0.012
    for low in (0.1, 0.3, 0.6, 0.8):
        chosen = (chances >= low) & (chances < low + 0.1)
        assert abs(float(batch.labels_B[chosen].mean() - chances[chosen].mean())) < 0.045
    assert 0.7 < auc(logits, batch.labels_B) < 0.87
    assert float(logits.var()) > 1.0
