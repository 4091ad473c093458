"""Baselines for a user's own events. They know what the model knows at each anchor: outcomes before it, those of the
hold-out among them.

Shapes: N anchors, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.yambda.neighbours import COLUMNS
from ...data.yambda.rates import MEANS
from ...data.yambda.schema import RATES
from ...errors import notice_once

MOST_ROWS = 1_000_000
"""Gradient boosting learns from the newest training anchors, at most so many."""
NEIGHBOURS = (*MEANS, "neighbours", "neighbours_sum")
_MEANS = [RATES.index(name) for name in MEANS]

Rates = NDArray[np.float32]
Rule = Callable[[Rates], Tensor]
"""Logits of anchors, or of candidates in their place, from the running rates."""


def running_means(rates_NF: Rates) -> Tensor:
    """The log odds of all outcomes so far, of the user's and of the item's, each smoothed, added up."""
    return torch.from_numpy(rates_NF[:, _MEANS].sum(1))


def regression(features_NF: Rates, labels_N: NDArray[np.float32]) -> tuple[NDArray[np.float64], float]:
    """Weights and intercept of a logistic regression by Newton's method, with a small penalty on the weights."""
    design_NF = np.concatenate([features_NF, np.ones((len(features_NF), 1), np.float32)], 1).astype(np.float64)
    weights_F = np.zeros(design_NF.shape[1])
    penalty_FF = np.diag([1.0] * features_NF.shape[1] + [1e-6])
    for _ in range(30):
        p_N = 1 / (1 + np.exp(-np.clip(design_NF @ weights_F, -30, 30)))
        slope_F = design_NF.T @ (labels_N - p_N) - penalty_FF @ weights_F
        curvature_FF = design_NF.T @ (design_NF * (p_N * (1 - p_N))[:, None]) + penalty_FF
        change_F = np.linalg.solve(curvature_FF, slope_F)
        weights_F += change_F
        if np.abs(change_F).max() < 1e-8:
            break
    return weights_F[:-1], float(weights_F[-1])


def regressed(train_NF: Rates, labels_N: NDArray[np.float32], columns: Sequence[str]) -> Rule:
    """A regression on some of the running rates."""
    which = [RATES.index(name) for name in columns]
    rule = linear(*regression(train_NF[:, which], labels_N))
    return lambda rates_NF: rule(rates_NF[:, which])


def linear(weights_F: NDArray[np.float64], intercept: float) -> Rule:
    return lambda rates_NF: torch.from_numpy(rates_NF.astype(np.float64) @ weights_F + intercept)


def gradient_boosting(train_NF: Rates, labels_N: NDArray[np.float32]) -> Rule | None:
    """scikit-learn's histogram gradient boosting on the running rates, without the columns of neighbours, which are
    item-kNN's; None where it is not installed."""
    try:
        ensemble = import_module("sklearn.ensemble")
    except ImportError:
        notice_once("no baseline of gradient boosting: it needs scikit-learn (pip install 'recperf[baselines]')")
        return None
    if labels_N.min() == labels_N.max():
        return None
    # Small steps and trees: on tens of thousands of rows they score higher than the defaults, which stop early.
    model = ensemble.HistGradientBoostingClassifier(
        learning_rate=0.03, max_iter=200, max_leaf_nodes=8, min_samples_leaf=100, early_stopping=False, random_state=0
    )
    model.fit(train_NF[:, :-COLUMNS], labels_N)
    return lambda rates_NF: torch.from_numpy(model.decision_function(rates_NF[:, :-COLUMNS]))
