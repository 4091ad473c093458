"""Rankings and baselines equal scikit-learn's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (
    label_ranking_average_precision_score,
    ndcg_score,
    top_k_accuracy_score,
)

from recperf.train import ranking
from recperf.train.baselines import FeatureRows, click_rules, fit_additive, majority
from recperf.train.metrics import auc
from recperf.train.ranking import RecentShares, first_positives, gains, positions


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
        higher_Q, same_Q, lists_QK = positions(score, rows_Q, own_Q, targets_Q, whole, top=10)
        assert int(same_Q.sum()) == 0
        assert torch.equal(lists_QK, scores_QI.topk(10)[1])
        found = {name: float(gain_Q.mean()) for name, gain_Q in gains(higher_Q, same_Q).items()}
        truth_QI = torch.nn.functional.one_hot(targets_Q, 57).numpy()
        assert found["ndcg_10"] == pytest.approx(ndcg_score(truth_QI, scores_QI.numpy(), k=10))
        assert found["mrr"] == pytest.approx(label_ranking_average_precision_score(truth_QI, scores_QI.numpy()))
        top = top_k_accuracy_score(targets_Q, scores_QI.numpy(), k=10, labels=np.arange(57))
        assert found["hit_rate_10"] == pytest.approx(top)


def test_each_user_has_one_row_the_first_in_time() -> None:
    labels_N = torch.tensor([0.0, 1, 1, 1, 0, 1])
    users_N, times_N = torch.tensor([7, 7, 7, 9, 4, 9]), torch.tensor([1, 5, 2, 8, 0, 3])
    assert sorted(first_positives(labels_N, users_N, times_N).tolist()) == [2, 5]
    assert sorted(first_positives(labels_N, users_N, None).tolist()) == [1, 3]


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


def test_bias_model_is_penalised_logistic_regression() -> None:
    draw = np.random.default_rng(1)
    users, items, rows, ridge = 30, 40, 4000, 2.0
    user, item = draw.integers(0, users, rows), draw.integers(0, items, rows)
    logit = draw.normal(size=users)[user] + draw.normal(size=items)[item] + 0.3
    labels = (draw.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    ids = [torch.from_numpy(user), torch.from_numpy(item)]
    ours = fit_additive(ids, torch.from_numpy(labels), ridge=ridge)(ids)

    def one_hot(which: np.ndarray, count: int) -> csr_matrix:
        return csr_matrix((np.ones(rows), (np.arange(rows), which)), shape=(rows, count))

    inputs = hstack([one_hot(user, users), one_hot(item, items)])
    oracle = LogisticRegression(C=1 / ridge, tol=1e-10, max_iter=5000).fit(inputs, labels)
    np.testing.assert_allclose(ours.numpy(), oracle.decision_function(inputs), atol=2e-4)


def test_majority_is_the_log_odds_even_of_one_class() -> None:
    assert torch.isfinite(majority(1.0, 3)).all()
    assert float(majority(0.5, 1)[0]) == 0.0


def test_click_baselines_read_every_category_of_a_row() -> None:
    """The first category says nothing, a later one everything; validation rows have ids that training rows lack."""
    draw = torch.Generator().manual_seed(3)
    ids_NL = torch.randint(2, 10, (2000, 3), generator=draw)
    ids_NL[:, 0], ids_NL[::5, 2] = 1, -1
    labels_N = (ids_NL == 7).any(1).float()

    def rows(part: slice) -> FeatureRows:
        ids = {"tags": ids_NL[part], "shop": torch.zeros(len(ids_NL[part]), dtype=torch.int64)}
        return FeatureRows(dense_ND=torch.zeros(len(ids_NL[part]), 0), ids=ids, labels_N=labels_N[part])

    train, valid = rows(slice(0, 1500)), rows(slice(1500, None))
    rules = click_rules(train, user=None, item=None)
    for name in ("logistic", "gradient_boosting"):
        assert auc(rules[name](valid), valid.labels_N) > 0.99
    valid.ids["tags"][0, 1], valid.ids["shop"][0] = 5000, 300
    assert all(torch.isfinite(rule(valid)).all() for rule in rules.values())
    one_class = replace(train, labels_N=torch.ones(1500))
    assert "gradient_boosting" not in click_rules(one_class, user=None, item=None)
