"""Simple baselines, fitted on training rows and scored on the rows a model is scored on.

Shapes: N samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.order import Samples
from ..data.random_bags import RandomBags
from ..errors import notice_once


def bias_logits(train: Samples, valid: Samples) -> dict[str, Tensor]:
    """Logits of the validation rows by majority class, item bias, and user + item bias logistic regression."""
    user, item = train.keys.index("user"), train.keys.index("item")
    return {
        "majority": majority(float(train.labels_N.double().mean()), len(valid)),
        "item_bias": additive_logits([train.ids_FN[item]], train.labels_N, [valid.ids_FN[item]]),
        "user_item_bias": additive_logits(
            [train.ids_FN[user], train.ids_FN[item]], train.labels_N, [valid.ids_FN[user], valid.ids_FN[item]]
        ),
    }


def popularity(train: Samples, valid: Samples) -> Tensor:
    """Logistic regression on the logarithm of how often an item is in the training rows."""
    item = train.keys.index("item")
    train_N, valid_N = train.ids_FN[item], valid.ids_FN[item]
    counts = torch.bincount(train_N, minlength=int(max(train_N.max(), valid_N.max())) + 1).double().log1p()
    design_N2 = torch.stack([torch.ones_like(counts[train_N]), counts[train_N]], 1)
    weight_2, labels_N = torch.zeros(2, dtype=torch.float64), train.labels_N.double()
    ridge_22 = 1e-6 * torch.eye(2, dtype=torch.float64)
    for _ in range(30):
        p_N = (design_N2 @ weight_2).sigmoid()
        slope_2 = design_N2.T @ (labels_N - p_N)
        curvature_22 = design_N2.T @ (design_N2 * (p_N * (1 - p_N)).unsqueeze(1)) + ridge_22
        change_2 = torch.linalg.solve(curvature_22, slope_2)
        weight_2 += change_2
        if float(change_2.abs().max()) < 1e-8:
            break
    return weight_2[0] + weight_2[1] * counts[valid_N]


def synthetic_logits(bags: RandomBags, held_out_batches: int) -> dict[str, Tensor]:
    """The majority class of as many training batches as are held out, and the logits that labels were drawn from."""
    first = (bags.batch(0, step) for step in range(min(len(bags), held_out_batches)))
    rate = float(torch.cat([batch.labels_B for batch in first]).double().mean())
    planted_N = torch.cat([bags.planted_logits(batch) for batch in bags.held_out(held_out_batches)]).cpu()
    return {"majority": majority(rate, len(planted_N)), "planted": planted_N}


def majority(rate: float, count: int) -> Tensor:
    """The log odds of the share of training labels that are 1, `count` times."""
    rate = min(max(rate, 1e-6), 1 - 1e-6)
    return torch.full((count,), math.log(rate / (1 - rate)), dtype=torch.float64)


def additive_logits(
    train_ids: list[Tensor],
    labels_N: Tensor,
    valid_ids: list[Tensor],
    *,
    dense: tuple[Tensor, Tensor] | None = None,
    ridge: float = 2.0,
    sweeps: int = 60,
    tolerance: float = 1e-6,
) -> Tensor:
    """Logistic regression with an intercept and one weight for each id, penalised by ridge / 2 * weight^2.

    Newton steps, one group of weights at a time: within a group the problem splits into one-dimensional ones. Ids may
    have several columns, of which negative ones are ignored. `dense` are numbers of the training and validation rows,
    one weight for each column.
    """
    labels_N = labels_N.double()
    rows = [int(max(a.max(), b.max())) + 1 for a, b in zip(train_ids, valid_ids)]
    weights = [torch.zeros(count, dtype=torch.float64) for count in rows]
    intercept = majority(float(labels_N.mean()), 1)[0]
    logits_N = intercept.expand_as(labels_N).clone()
    numbers = [part.double() for part in dense] if dense is not None and dense[0].shape[1] else None
    slopes = torch.zeros(numbers[0].shape[1] if numbers else 0, dtype=torch.float64)
    for _ in range(sweeps):
        largest = 0.0
        for ids, weight in zip(train_ids, weights):
            p_N = logits_N.sigmoid()
            # Ids of one row move its logit together: smaller steps keep their sum from overshooting.
            most = ids.shape[1] if ids.ndim == 2 else 1
            slope = _totals(ids, labels_N - p_N, len(weight)) - ridge * weight
            curvature = _totals(ids, p_N * (1 - p_N), len(weight)) * most + ridge
            change = slope / curvature
            weight += change
            logits_N += _looked_up(change, ids)
            largest = max(largest, float(change.abs().max()))
        if numbers:
            p_N = logits_N.sigmoid()
            slope = numbers[0].T @ (labels_N - p_N) - ridge * slopes
            curved = numbers[0].T @ (numbers[0] * (p_N * (1 - p_N)).unsqueeze(1))
            change = torch.linalg.solve(curved + ridge * torch.eye(len(slopes), dtype=torch.float64), slope)
            slopes += change
            logits_N += numbers[0] @ change
            largest = max(largest, float(change.abs().max()))
        p_N = logits_N.sigmoid()
        shift = (labels_N - p_N).sum() / (p_N * (1 - p_N)).sum().clamp_min(1e-12)
        intercept = intercept + shift
        logits_N += shift
        if max(largest, abs(float(shift))) < tolerance:
            break
    result = intercept.expand(len(valid_ids[0])).clone()
    for ids, weight in zip(valid_ids, weights):
        result += _looked_up(weight, ids)
    return result + numbers[1] @ slopes if numbers else result


def _totals(ids: Tensor, values_N: Tensor, count: int) -> Tensor:
    """The sum of the values of each id's rows."""
    if ids.ndim == 1:
        return torch.bincount(ids, values_N, count)
    return torch.bincount(ids[ids >= 0], values_N.unsqueeze(1).expand_as(ids)[ids >= 0], count)


def _looked_up(weight: Tensor, ids: Tensor) -> Tensor:
    """The weight of each row's id, or the sum of those of its ids."""
    return weight[ids] if ids.ndim == 1 else torch.where(ids >= 0, weight[ids.clamp_min(0)], 0.0).sum(1)


MOST_TRAINING_ROWS = 500_000
"""Baselines of click rows are fitted on at most so many training rows, at equal distances."""
_MOST_CATEGORIES = 254
_FOLDS, _PRIOR_ROWS = 5, 10


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureRows:
    """Click rows as a model reads them: numbers, for each sparse feature the table rows, and labels."""

    dense_ND: Tensor
    ids: dict[str, Tensor]
    """By feature: one id a row, or [rows, most ids] with -1 for none."""
    labels_N: Tensor


def click_logits(train: FeatureRows, valid: FeatureRows, *, user: str | None, item: str | None) -> dict[str, Tensor]:
    """Logits of the validation rows by rules and models of the same features: the majority class, biases of user and
    item or else of every category, logistic regression, and gradient boosting if scikit-learn is installed."""

    def additive(keys: Iterable[str], **more: Any) -> Tensor:
        keys = list(keys)
        ids = ([part.ids[key] for key in keys] for part in (train, valid))
        return additive_logits(next(ids), train.labels_N, next(ids), **more)

    logits = {"majority": majority(float(train.labels_N.double().mean()), len(valid.labels_N))}
    if item is not None:
        logits["item_bias"] = additive([item])
    if user is not None and item is not None:
        logits["user_item_bias"] = additive([user, item])
    elif len(train.ids) > 1 or train.dense_ND.shape[1]:
        logits["category_bias"] = additive(train.ids, sweeps=20, tolerance=1e-4)
    dense = (train.dense_ND, valid.dense_ND)
    logits["logistic"] = additive(train.ids, dense=dense, sweeps=20, tolerance=1e-4)
    boosted = _boosted(train, valid)
    return logits if boosted is None else {**logits, "gradient_boosting": boosted}


def _boosted(train: FeatureRows, valid: FeatureRows) -> Tensor | None:
    """scikit-learn's histogram gradient boosting; columns with many categories become their cross-fitted mean label."""
    try:
        ensemble = import_module("sklearn.ensemble")
    except ImportError:
        notice_once("no baseline of gradient boosting: it needs scikit-learn (pip install 'recperf[baselines]')")
        return None
    labels = train.labels_N.numpy()
    columns, is_category = [train.dense_ND.numpy()], [False] * train.dense_ND.shape[1]
    scored = [valid.dense_ND.numpy()]
    for key, ids in train.ids.items():
        rows, others = (part.reshape(len(part), -1)[:, :1].numpy() for part in (ids, valid.ids[key]))
        few = max(int(rows.max()), int(others.max())) < _MOST_CATEGORIES
        if not few:
            rows, others = _mean_labels(rows[:, 0], labels, others[:, 0])
        columns.append(rows)
        scored.append(others)
        is_category.append(few)
    model = ensemble.HistGradientBoostingClassifier(categorical_features=is_category, random_state=0)
    model.fit(np.concatenate(columns, 1).astype(np.float32), labels)
    return torch.from_numpy(model.decision_function(np.concatenate(scored, 1).astype(np.float32)))


def _mean_labels(
    rows: NDArray[np.int64], labels: NDArray[np.float32], others: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean label of each row's category among training rows of other folds, drawn to that of all rows."""
    count, rate = int(max(rows.max(), others.max())) + 1, float(labels.mean())
    fold = np.arange(len(rows)) % _FOLDS
    own = fold * count + rows
    totals = [
        np.bincount(own, values, _FOLDS * count).reshape(_FOLDS, count) for values in (labels, np.ones_like(labels))
    ]
    clicks, shown = totals[0].sum(0), totals[1].sum(0)

    def mean(clicks: NDArray[np.float64], shown: NDArray[np.float64]) -> NDArray[np.float64]:
        return ((clicks + _PRIOR_ROWS * rate) / (shown + _PRIOR_ROWS))[:, None]

    return mean(clicks[rows] - totals[0].ravel()[own], shown[rows] - totals[1].ravel()[own]), mean(
        clicks[others], shown[others]
    )
