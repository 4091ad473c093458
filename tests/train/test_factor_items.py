"""Matrix factorisation: a sweep solves what numpy solves row by row, and ranks where users keep to their taste."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_linear_items import planted

from recperf.data.next_item import NextItemData
from recperf.train import factor_items
from recperf.train.factor_items import ALL_ITEMS, ItemFactors, Members, _pairs, conjugate_gradients, factor_baseline
from recperf.train.item_rules import popularity
from recperf.train.next_item import rank


def taken_by(data: NextItemData) -> np.ndarray[Any, Any]:
    """Which items each user has in the training events."""
    train, taken_UI = data.train(), np.zeros((data.users, data.items))
    for user, begin, end in zip(train.users_S, train.begins_S, train.ends_S):
        taken_UI[user, data.items_E[begin:end] - 1] = 1
    return taken_UI


def closed_form(taken_OM: Any, vectors_MD: Any, weight: float, penalty: float) -> Any:
    """Each row alone: least squares to 1 for what was taken and, with the weight, to 0 for everything."""
    solved = []
    for taken_M in taken_OM:
        own = vectors_MD[taken_M > 0]
        ridge = penalty * (len(own) + weight * len(vectors_MD)) * np.eye(vectors_MD.shape[1])
        solved.append(np.linalg.solve(own.T @ own + weight * vectors_MD.T @ vectors_MD + ridge, own.sum(0)))
    return np.stack(solved)


@pytest.mark.parametrize("entries", [1, 1 << 20])
def test_vectors_solve_the_least_squares_of_each_owner(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factor_items, "_ENTRIES", entries)
    monkeypatch.setattr(factor_items, "START_STEPS", 40)
    taken_UI, draw = taken_by(planted()), np.random.default_rng(5)
    taken_UI[3] = 0
    vectors_ID = draw.normal(size=(taken_UI.shape[1], 6))
    members = Members.of(*np.nonzero(taken_UI), len(taken_UI))
    solved = members.solved(torch.from_numpy(vectors_ID), 0.2, 0.05).numpy()
    np.testing.assert_allclose(solved, closed_form(taken_UI, vectors_ID, 0.2, 0.05), rtol=1e-6, atol=1e-9)
    assert not solved[3].any()


def test_conjugate_gradients_start_from_what_they_have() -> None:
    draw = np.random.default_rng(6)
    left = draw.normal(size=(5, 4, 4))
    left_BDD = torch.from_numpy(left @ left.transpose(0, 2, 1) + np.eye(4))
    right_BD = torch.from_numpy(draw.normal(size=(5, 4)))

    def product(x_BD: torch.Tensor) -> torch.Tensor:
        return (left_BDD @ x_BD[:, :, None])[:, :, 0]

    exact = torch.linalg.solve(left_BDD, right_BD)
    torch.testing.assert_close(conjugate_gradients(product, right_BD, torch.zeros(5, 4).double(), 4), exact)
    torch.testing.assert_close(conjugate_gradients(product, right_BD, exact, 2), exact)


def test_sweeps_lower_the_loss_that_they_state() -> None:
    data = planted()
    taken_UI = taken_by(data)
    users_P, columns_P = _pairs(data)
    assert sorted(zip(users_P.tolist(), columns_P.tolist())) == sorted(
        zip(*(one.tolist() for one in np.nonzero(taken_UI)))
    )
    weight, losses = ALL_ITEMS * taken_UI.sum() / taken_UI.size, []
    for sweeps in (1, 2, 4, 8):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factor_items, "SWEEPS", sweeps)
            patch.setattr(factor_items, "STEPS", 30)
            model = ItemFactors.fitted(data, 0.03, (users_P, columns_P))
        assert model.weight == pytest.approx(weight)
        items_ID = model.items_ID.double().numpy()
        users_UD = closed_form(taken_UI, items_ID, weight, 0.03)
        scores_UI = users_UD @ items_ID.T
        squares = [
            (taken.sum(1) + weight * taken.shape[1]) @ (vectors**2).sum(1)
            for taken, vectors in ((taken_UI, users_UD), (taken_UI.T, items_ID))
        ]
        losses.append((taken_UI * (1 - scores_UI) ** 2).sum() + weight * (scores_UI**2).sum() + 0.03 * sum(squares))
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


def test_it_ranks_above_popularity_where_users_keep_to_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(4)
    items = [draw.permutation(20)[:12] + 20 * (user % 4) + 1 for user in range(200)]
    data = NextItemData(
        name="groups", items=80, users=200, offsets_U1=12 * np.arange(201),
        items_E=np.concatenate(items).astype(np.int32), times_E=None,
    )  # fmt: skip

    def ndcg(score: Any) -> float:
        return rank(data, data.test(), score, seen="left-out").metrics()["ndcg_10"]

    (make,) = factor_baseline(data).values()
    assert ndcg(make()) > 0.4 > 2 * ndcg(popularity(data))
    # Vectors of items that were fitted to every third user serve all of them.
    monkeypatch.setattr(factor_items, "MOST_PAIRS", 700)
    assert len(np.unique(_pairs(data)[0])) == 67
    assert ndcg(make()) > 0.4
