"""Ranking metrics equal scikit-learn's, also with ties, whichever way candidates are batched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    label_ranking_average_precision_score,
    ndcg_score,
    roc_auc_score,
    top_k_accuracy_score,
)

from recperf.train import ranking
from recperf.train.ranking import RecentShares, drawn, first_positives, gains, positions, within_users


def test_metrics_are_scikit_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    scores_QI = torch.from_numpy(draw.normal(size=(40, 57)))
    targets_Q, rows_Q = torch.from_numpy(draw.integers(0, 57, 40)), torch.arange(40)
    scores_QI[rows_Q, targets_Q] += 1
    own_Q = scores_QI[rows_Q, targets_Q]
    for pairs in (100, 1 << 16):
        monkeypatch.setattr(ranking, "PAIRS", pairs)
        whole = (torch.arange(57) for _ in range(40))
        score = lambda rows_P, items_P: scores_QI[rows_P, items_P]  # noqa: E731
        higher_Q, same_Q = positions(score, rows_Q, own_Q, targets_Q, whole)
        assert int(same_Q.sum()) == 0
        found = {name: float(gain_Q.mean()) for name, gain_Q in gains(higher_Q, same_Q).items()}
        truth_QI = torch.nn.functional.one_hot(targets_Q, 57).numpy()
        assert found["ndcg_10"] == pytest.approx(ndcg_score(truth_QI, scores_QI.numpy(), k=10))
        assert found["mrr"] == pytest.approx(label_ranking_average_precision_score(truth_QI, scores_QI.numpy()))
        top = top_k_accuracy_score(targets_Q, scores_QI.numpy(), k=10, labels=np.arange(57))
        assert found["hit_rate_10"] == pytest.approx(top)


def test_ties_count_as_if_broken_at_random() -> None:
    draw = np.random.default_rng(2)
    scores, ranks = np.array([3, 2, 2, 2, 1, 1]), []
    for _ in range(4000):
        order = np.lexsort((draw.random(6), -scores))
        ranks.append(1 + int(np.flatnonzero(order == 1)[0]))
    higher, same = torch.tensor([1]), torch.tensor([2])
    expected = {"hit_rate_3": np.mean(np.array(ranks) <= 3), "mrr": np.mean(1 / np.array(ranks))}
    found = gains(higher, same, top=3)
    for name, value in expected.items():
        assert float(found[name][0]) == pytest.approx(value, abs=0.02)
    # A model that says the same of everything must not come first.
    assert float(gains(torch.tensor([0]), torch.tensor([999]))["hit_rate_10"][0]) == pytest.approx(0.01)


@pytest.mark.parametrize("levels", [1000, 3])
def test_metrics_within_users_are_scikit_learns(levels: int) -> None:
    draw = np.random.default_rng(levels)
    users = draw.integers(0, 30, 400) * 5
    labels, scores = (draw.random(400) < 0.3).astype(float), draw.integers(0, levels, 400) / 7
    users[:3], labels[:3] = 1000, 0.0
    values, rows = within_users(torch.from_numpy(scores), torch.from_numpy(labels), torch.from_numpy(users))
    expected = []
    for user in users[rows.numpy()]:
        own = users == user
        expected.append((
            roc_auc_score(labels[own], scores[own]), ndcg_score(labels[own][None], scores[own][None], k=10)
        ))  # fmt: skip
    assert 1000 not in users[rows.numpy()]
    assert len(expected) > 20
    np.testing.assert_allclose(torch.stack(list(values.values()), 1).numpy(), expected, atol=1e-12)


def test_each_user_has_one_row_the_first_in_time() -> None:
    labels_N = torch.tensor([0.0, 1, 1, 1, 0, 1])
    users_N, times_N = torch.tensor([7, 7, 7, 9, 4, 9]), torch.tensor([1, 5, 2, 8, 0, 3])
    assert sorted(first_positives(labels_N, users_N, times_N).tolist()) == [2, 5]
    assert sorted(first_positives(labels_N, users_N, None).tolist()) == [1, 3]


@pytest.mark.parametrize("count", [3, 40, 500])
def test_drawn_items_are_different_and_repeat(count: int) -> None:
    items_I = torch.arange(100) * 3
    items = drawn(items_I, count, 17)
    assert len(items.unique()) == len(items) == min(count, 100)
    assert torch.equal(items, drawn(items_I, count, 17))
    assert set(items.tolist()) <= set(items_I.tolist())


def test_shares_are_of_earlier_events_within_the_time() -> None:
    draw = torch.Generator().manual_seed(3)
    items_N, times_N = (torch.randint(high, (400,), generator=draw) for high in (7, 50))
    shares = RecentShares(items_N, times_N, 7, 9)
    for now in (0, 5, 23, 50):
        recent_N = (times_N < now) & (times_N >= now - 9)
        counts_I = torch.bincount(items_N[recent_N], minlength=7)
        expected_I = (counts_I + 1 / 7) / (recent_N.sum() + 1)
        shares_I = shares(torch.arange(7), torch.full((7,), now)).exp()
        torch.testing.assert_close(shares_I, expected_I.double(), check_dtype=False)
        assert float(shares_I.sum()) == pytest.approx(1)


@pytest.mark.parametrize(("lives", "seconds"), [(4096, 4096), (128, 128)])
def test_how_long_an_event_counts_follows_the_data(lives: int, seconds: int) -> None:
    """Items that stay, and items of which others are there after a while."""
    draw, times_N = torch.Generator().manual_seed(3), torch.arange(4096)
    items_N = times_N // lives * 10 + torch.randint(10, (4096,), generator=draw)
    users_N, labels_N = torch.randint(500, (4096,), generator=draw), torch.ones(4096)
    fitted = RecentShares(items_N, times_N, int(items_N.max()) + 1).fitted(users_N, labels_N)
    assert seconds // 4 <= fitted.seconds <= seconds
