from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from recperf.data.batch import ClickBatch
from recperf.data.random_clicks import RandomClicks
from recperf.errors import ConfigError
from recperf.train.metrics import auc

BASE = RandomClicks(
    keys=("user", "item", "shop"),
    dense=5,
    batch_size=32,
    batches_per_epoch=4,
    seed=7,
    ids="uniform",
    id_space=10_000,
    ids_per_bag=3,
)


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


def many_ids(clicks: RandomClicks, count: int) -> torch.Tensor:
    return torch.cat([clicks.batch(0, step).features.values_V for step in range(count)])


@pytest.mark.parametrize("ids", ["uniform", "zipf"])
def test_a_batch_depends_on_seed_epoch_and_step_only(ids: Any) -> None:
    clicks = replace(BASE, ids=ids)
    wanted = clicks.batch(2, 3)
    torch.manual_seed(5)
    torch.rand(3)
    fresh = replace(BASE, ids=ids)
    list(fresh.batches(0))
    list(fresh.held_out(2))
    assert same(fresh.batch(2, 3), wanted)
    assert same(list(fresh.batches(2))[3], wanted)
    assert same(next(fresh.batches(2, start=3)), wanted)


@pytest.mark.parametrize("ids", ["uniform", "zipf"])
def test_no_two_batches_are_alike(ids: Any) -> None:
    clicks = replace(BASE, ids=ids)
    batches = [batch for epoch in range(3) for batch in clicks.batches(epoch)]
    batches += list(clicks.held_out(6)) + list(replace(clicks, seed=8).batches(0))
    dense = {tuple(batch.dense_BD.flatten().tolist()) for batch in batches}
    values = {tuple(batch.features.values_V.tolist()) for batch in batches}
    assert len(dense) == len(values) == len(batches) == 22


def test_no_random_number_serves_twice() -> None:
    clicks = replace(BASE, batch_size=2048, id_space=1 << 40, dense=1)
    drawn = [b.features.values_V for b in (*clicks.batches(0), *clicks.batches(1), *clicks.held_out(4))]
    ids = torch.cat(drawn)
    by_chance = ids.numel() ** 2 / 2 / clicks.id_space
    assert ids.numel() - ids.unique().numel() < 5 + 5 * by_chance


def test_held_out_batches_stay_the_same() -> None:
    again = list(BASE.held_out(3))
    assert all(same(one, other) for one, other in zip(BASE.held_out(3), again))
    assert same(next(BASE.held_out(1)), again[0])


@pytest.mark.parametrize("ids", ["uniform", "zipf"])
@pytest.mark.parametrize("per_bag", [1, 3])
def test_shapes_types_and_ranges(ids: Any, per_bag: int) -> None:
    batch = replace(BASE, ids=ids, ids_per_bag=per_bag).batch(0, 0)
    features = batch.features
    assert batch.dense_BD.shape == (32, 5)
    assert batch.dense_BD.dtype == batch.labels_B.dtype == torch.float32
    assert batch.dense_BD.abs().max() <= 3**0.5
    assert features.values_V.dtype == features.offsets_FB1.dtype == torch.int64
    assert features.values_V.shape == (3 * 32 * per_bag,)
    assert 0 <= features.values_V.min() <= features.values_V.max() < 10_000
    assert features.offsets_FB1.tolist() == list(range(0, 3 * 32 * per_bag + 1, per_bag))
    assert features.one_id_a_bag == (per_bag == 1)
    assert features.ids_per_key == (32 * per_bag,) * 3
    assert set(batch.labels_B.tolist()) == {0.0, 1.0}
    assert all(tensor.is_contiguous() for tensor in (batch.dense_BD, features.values_V, batch.labels_B))


def test_offsets_are_built_once() -> None:
    clicks = replace(BASE)
    assert clicks.batch(0, 0).features.offsets_FB1 is clicks.batch(1, 2).features.offsets_FB1


def test_an_epoch_has_its_length() -> None:
    assert len(BASE) == len(list(BASE.batches(0))) == 4
    assert len(list(BASE.batches(0, start=3))) == 1
    assert list(BASE.batches(0, start=4)) == []
    for epoch, step in ((-1, 0), (0, 4), (0, -1)):
        with pytest.raises(IndexError, match="no batch"):
            BASE.batch(epoch, step)


@pytest.mark.parametrize(("space", "span"), [(1000, None), (1 << 40, 1000), (2_000_000, 1682)])
def test_uniform_ids_are_uniform_over_the_span(space: int, span: int | None) -> None:
    clicks = replace(BASE, id_space=space, span=span, batch_size=4096, batches_per_epoch=8)
    count = span or space
    seen = np.bincount(many_ids(clicks, 8).numpy(), minlength=count)
    assert len(seen) == count
    expected = seen.sum() / count
    statistic = ((seen - expected) ** 2 / expected).sum()
    # Chi-square with this many degrees of freedom is all but normal.
    assert abs(statistic - (count - 1)) < 4 * (2 * (count - 1)) ** 0.5


def test_a_span_changes_the_ids_alone() -> None:
    cold, hot = BASE.batch(0, 0), replace(BASE, span=10).batch(0, 0)
    assert torch.equal(cold.dense_BD, hot.dense_BD)
    assert torch.equal(cold.features.offsets_FB1, hot.features.offsets_FB1)
    assert hot.features.values_V.max() < 10 <= cold.features.values_V.max()


@pytest.mark.parametrize("space", [1, 2, 3, 1 << 40, (1 << 40) - 1])
@pytest.mark.parametrize("ids", ["uniform", "zipf"])
def test_smallest_and_largest_spaces(space: int, ids: Any) -> None:
    found = replace(BASE, id_space=space, ids=ids, batch_size=4096).batch(0, 0).features.values_V
    assert 0 <= found.min() <= found.max() < space
    assert found.unique().numel() >= min(space, 1000)
    if space > 3:
        assert found.max() > 0.9 * space


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.05, 1.5])
def test_zipf_heads_are_as_popular_as_theory_says(exponent: float) -> None:
    space = 100_000
    clicks = replace(BASE, ids="zipf", id_space=space, exponent=exponent, batch_size=8192, batches_per_epoch=5)
    seen = np.sort(np.bincount(many_ids(clicks, 5).numpy(), minlength=space))[::-1]
    theory = np.arange(1, space + 1) ** -exponent
    theory /= theory.sum()
    draws = seen.sum()
    for head, tolerance in ((1, 0.2), (10, 0.1), (100, 0.06), (1000, 0.05)):
        noise = 4 * (theory[:head].sum() * draws) ** -0.5
        if noise < 0.2:
            assert seen[:head].sum() / draws == pytest.approx(theory[:head].sum(), rel=tolerance + noise)


@pytest.mark.parametrize("space", [997, 1000, 1024])
def test_ranks_are_scattered_one_to_one(space: int) -> None:
    multiplier, offset = replace(BASE, ids="zipf", id_space=space)._scatter
    ids = [(rank * multiplier + offset) % space for rank in range(space)]
    assert sorted(ids) == list(range(space))
    head = sorted(ids[:20])
    assert min(b - a for a, b in zip(head, head[1:])) > space // 100


def test_popular_ids_are_not_neighbours_in_a_large_space() -> None:
    clicks = replace(BASE, ids="zipf", id_space=1 << 40, batch_size=8192)
    found, counts = many_ids(clicks, 4).unique(return_counts=True)
    popular = found[counts.topk(50).indices].sort().values
    assert popular.diff().min() > 1000


def everything(batches: list[ClickBatch]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([b.dense_BD for b in batches]), torch.cat([b.labels_B for b in batches])


def logistic_regression(dense_ND: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Weights by Newton's method."""
    weights_D = torch.zeros(dense_ND.shape[1])
    for _ in range(6):
        chances_N = (dense_ND @ weights_D).sigmoid()
        curvature_DD = (dense_ND.T * (chances_N * (1 - chances_N))) @ dense_ND
        weights_D -= torch.linalg.solve(curvature_DD, dense_ND.T @ (chances_N - labels_N))
    return weights_D


@pytest.mark.parametrize("ids", ["uniform", "zipf"])
def test_dense_features_alone_predict_held_out_labels(ids: Any) -> None:
    clicks = replace(BASE, ids=ids, batch_size=2048)
    (dense, labels), (unseen, answers) = everything(list(clicks.batches(0))), everything(list(clicks.held_out(4)))
    found = auc(unseen @ logistic_regression(dense, labels), answers)
    best = auc(torch.cat([clicks.planted_logits(b.dense_BD, b.features.values_V) for b in clicks.held_out(4)]), answers)
    assert 0.62 < found < best
    assert 0.7 < best < 0.85
    assert 0.4 < float(labels.mean()) < 0.6


def test_scores_of_popular_ids_can_be_learnt() -> None:
    """A table of the mean label by id, fitted on training batches, helps on held-out ones."""
    clicks = replace(BASE, keys=("item",), ids="zipf", id_space=1000, ids_per_bag=1, batch_size=8192)
    total, count = torch.zeros(1000), torch.zeros(1000)
    for batch in clicks.batches(0):
        total.index_add_(0, batch.features.values_V, batch.labels_B)
        count.index_add_(0, batch.features.values_V, torch.ones(8192))
    rate = (total + 1) / (count + 2)
    unseen = next(clicks.held_out(1))
    assert auc(rate[unseen.features.values_V], unseen.labels_B) > 0.56


def test_labels_follow_their_log_odds() -> None:
    clicks = replace(BASE, batch_size=50_000)
    batch = clicks.batch(0, 0)
    chances = clicks.planted_logits(batch.dense_BD, batch.features.values_V).sigmoid()
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        chosen = (chances >= low) & (chances < low + 0.2)
        spread = 0.5 / float(chosen.sum()) ** 0.5
        assert abs(float(batch.labels_B[chosen].mean() - chances[chosen].mean())) < 4 * spread


def test_dense_features_have_mean_0_and_variance_1() -> None:
    dense = replace(BASE, batch_size=50_000).batch(0, 0).dense_BD
    assert dense.mean(0).abs().max() < 0.02
    assert (dense.var(0) - 1).abs().max() < 0.02
    assert (torch.corrcoef(dense.T) - torch.eye(5)).abs().max() < 0.02


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keys", ()),
        ("dense", 0),
        ("batch_size", 0),
        ("batches_per_epoch", 0),
        ("ids_per_bag", 0),
        ("ids", "gauss"),
        ("id_space", 0),
        ("id_space", (1 << 40) + 1),
        ("exponent", 0.0),
        ("span", 0),
        ("span", 10_001),
    ],
)
def test_values_that_cannot_be_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} is"):
        replace(BASE, **{field: value})


def test_a_span_is_for_uniform_ids() -> None:
    with pytest.raises(ConfigError, match="none unless ids is uniform"):
        replace(BASE, ids="zipf", span=10)
