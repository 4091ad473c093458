"""Baselines for a user's own events. They know what the model knows at each anchor: outcomes before it, those of the
hold-out among them.

Shapes: N anchors, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.yambda.neighbours import COLUMNS
from ...data.yambda.rates import MEANS
from ...data.yambda.schema import RATES
from ...train.baselines import boosting, regression

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


def regressed(train_NF: Rates, labels_N: NDArray[np.float32], columns: Sequence[str]) -> Rule:
    """A regression on some of the running rates."""
    which = [RATES.index(name) for name in columns]
    rule = linear(*regression(train_NF[:, which], labels_N))
    return lambda rates_NF: rule(rates_NF[:, which])


def linear(weights_F: NDArray[np.float64], intercept: float) -> Rule:
    return lambda rates_NF: torch.from_numpy(rates_NF.astype(np.float64) @ weights_F + intercept)


def gradient_boosting(train_NF: Rates, labels_N: NDArray[np.float32]) -> Rule | None:
    """scikit-learn's histogram gradient boosting on the running rates, without the columns of neighbours, which are
    item-kNN's; None where it is not installed or the labels are of one class."""
    # Small steps and trees: on tens of thousands of rows they score higher than the defaults, which stop early.
    model = boosting(
        labels_N, learning_rate=0.03, max_iter=200, max_leaf_nodes=8, min_samples_leaf=100, early_stopping=False
    )
    if model is None:
        return None
    model.fit(train_NF[:, :-COLUMNS], labels_N)
    return lambda rates_NF: torch.from_numpy(model.decision_function(rates_NF[:, :-COLUMNS]))
