"""Baselines for a user's own events. They know what the model knows at each anchor: outcomes before it, those of the
hold-out among them.

Shapes: N anchors, F features.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.yambda.schema import RATES
from ...errors import notice_once

MOST_ROWS = 1_000_000
"""Gradient boosting learns from the newest training anchors, at most so many."""
MEANS = tuple(RATES.index(name) for name in ("overall", "user", "item"))

Rates = NDArray[np.float32]


def running_means(rates_NF: Rates) -> Tensor:
    """The log odds of all outcomes so far, of the user's and of the item's, each smoothed, added up."""
    return torch.from_numpy(rates_NF[:, MEANS].sum(1))


def gradient_boosting(train_NF: Rates, labels_N: NDArray[np.float32], valid_NF: Rates) -> Tensor | None:
    """scikit-learn's histogram gradient boosting on the running rates; None where it is not installed."""
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
    model.fit(train_NF, labels_N)
    return torch.from_numpy(model.decision_function(valid_NF))
