"""Baselines equal scikit-learn's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression

from recperf.train.baselines import FeatureRows, click_rules, fit_additive, majority
from recperf.train.metrics import auc


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
