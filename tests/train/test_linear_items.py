"""EASE is the least-squares solution: the weights of an item, solved alone by numpy, predict it from the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recperf.data.next_item import NextItemData, PlantedSequences
from recperf.train.linear_items import MOST_ITEMS, PENALTIES, LinearItems, linear_baseline
from recperf.train.next_item import rank


def planted() -> NextItemData:
    return PlantedSequences(users=150, groups=3, group_items=5, seed=2).data()


def test_weights_solve_the_least_squares_of_each_item() -> None:
    data = planted()
    train, taken_UI = data.train(), np.zeros((data.users, data.items))
    for user, begin, end in zip(train.users_S, train.begins_S, train.ends_S):
        taken_UI[user, data.items_E[begin:end] - 1] = 1
    for penalty, model in zip(PENALTIES, LinearItems.options(data)):
        for item in (0, 7, data.items - 1):
            others = np.delete(np.arange(data.items), item)
            left = taken_UI[:, others]
            right = left.T @ taken_UI[:, item]
            solved = np.linalg.solve(left.T @ left + penalty * np.eye(len(others)), right)
            assert model.weights_II[others, item].numpy() == pytest.approx(solved, abs=1e-5)
            assert model.weights_II[item, item] == 0


def test_scores_add_up_each_item_of_a_history_once() -> None:
    data = planted()
    model, targets = next(LinearItems.options(data)), data.test()
    items = data.items_E[data.offsets_U1[3] : targets.positions_N[3]] - 1
    assert len(set(items)) < len(items), "some item is there twice"
    expected = model.weights_II[torch.from_numpy(np.unique(items).astype(np.int64))].sum(0)
    torch.testing.assert_close(model(targets)[3], expected, rtol=1e-5, atol=1e-6)


def test_it_ranks_above_popularity_where_users_keep_to_a_group() -> None:
    draw = np.random.default_rng(4)
    items = [draw.permutation(20)[:12] + 20 * (user % 4) + 1 for user in range(200)]
    data = NextItemData(
        name="groups", items=80, users=200, offsets_U1=12 * np.arange(201),
        items_E=np.concatenate(items).astype(np.int32), times_E=None,
    )  # fmt: skip
    (make,) = linear_baseline(data).values()
    scorer = make()
    popular = torch.from_numpy(np.bincount(data.items_E, minlength=81)[1:].astype(np.float64))
    own, other = (
        rank(data, data.test(), score, seen="left-out").metrics()["ndcg_10"]
        for score in (scorer, lambda targets: popular.expand(len(targets), -1))
    )
    # A group has 9 items that the user has not had.
    assert own > 0.4 > 2 * other


def test_a_catalogue_too_large_has_none() -> None:
    data = NextItemData(
        name="many", items=MOST_ITEMS + 1, users=1, offsets_U1=np.array([0, 3]), items_E=np.array([1, 2, 3], np.int32),
        times_E=None,
    )  # fmt: skip
    assert linear_baseline(data) == {}
