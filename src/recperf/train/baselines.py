"""Simple baselines, fitted on training rows and scored on the rows a model is scored on.

Shapes: N samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.order import Samples
from . import boosting
from .boosting import FeatureRows

if TYPE_CHECKING:
    from ..data.random_bags import RandomBags


def bias_logits(train: Samples, valid: Samples) -> dict[str, Tensor]:
    """Logits of the validation rows by majority class, item bias, and user + item bias logistic regression."""
    logits = {"majority": majority(float(train.labels_N.double().mean()), len(valid))}
    for name, keys in (("item_bias", ["item"]), ("user_item_bias", ["user", "item"])):
        places = [train.keys.index(key) for key in keys]
        fitted = fit_additive([train.ids_FN[place] for place in places], train.labels_N)
        logits[name] = fitted([valid.ids_FN[place] for place in places])
    return logits


def popularity(train: Samples, valid: Samples) -> Tensor:
    """Logistic regression on the logarithm of how often an item is in the training rows."""
    item = train.keys.index("item")
    train_N, valid_N = train.ids_FN[item], valid.ids_FN[item]
    counts = torch.bincount(train_N, minlength=int(max(train_N.max(), valid_N.max())) + 1).double().log1p()
    weights_1, intercept = regression(counts[train_N, None].numpy(), train.labels_N.numpy(), penalty=1e-6)
    return intercept + float(weights_1[0]) * counts[valid_N]


def regression(
    features_NF: NDArray[Any], labels_N: NDArray[np.float32], *, penalty: float = 1.0
) -> tuple[NDArray[np.float64], float]:
    """Weights and intercept of a logistic regression by Newton's method; penalty / 2 * weight^2 is added to the loss,
    summed over rows, for each weight."""
    design_NF = np.concatenate([features_NF, np.ones((len(features_NF), 1), np.float32)], 1).astype(np.float64)
    weights_F = np.zeros(design_NF.shape[1])
    penalty_FF = np.diag([penalty] * features_NF.shape[1] + [1e-6])
    for _ in range(30):
        p_N = 1 / (1 + np.exp(-np.clip(design_NF @ weights_F, -30, 30)))
        slope_F = design_NF.T @ (labels_N - p_N) - penalty_FF @ weights_F
        curvature_FF = design_NF.T @ (design_NF * (p_N * (1 - p_N))[:, None]) + penalty_FF
        change_F = np.linalg.solve(curvature_FF, slope_F)
        weights_F += change_F
        if np.abs(change_F).max() < 1e-8:
            break
    return weights_F[:-1], float(weights_F[-1])


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Additive:
    """A logistic regression with an intercept, one weight for each id and one for each number."""

    intercept: Tensor
    weights: list[Tensor]
    slopes_D: Tensor

    def __call__(self, ids: list[Tensor], dense_ND: Tensor | None = None) -> Tensor:
        """Logits of rows; an id above those of the training rows has weight 0."""
        logits_N = self.intercept.expand(len(ids[0])).clone()
        for ids_N, weight in zip(ids, self.weights):
            logits_N += _looked_up(torch.nn.functional.pad(weight, (0, 1)), ids_N.clamp_max(len(weight)))
        return logits_N if dense_ND is None else logits_N + dense_ND.double() @ self.slopes_D


def fit_additive(
    ids: list[Tensor],
    labels_N: Tensor,
    dense_ND: Tensor | None = None,
    *,
    ridge: float = 2.0,
    sweeps: int = 60,
    tolerance: float = 1e-6,
) -> Additive:
    """Fit a regression whose weights are penalised by ridge / 2 * weight^2.

    Newton steps, one group of weights at a time: within a group the problem splits into one-dimensional ones. Ids may
    have several columns, of which negative ones are ignored.
    """
    labels_N = labels_N.double()
    weights = [torch.zeros(int(ids_N.max()) + 1, dtype=torch.float64) for ids_N in ids]
    intercept = majority(float(labels_N.mean()), 1)[0]
    logits_N = intercept.expand_as(labels_N).clone()
    numbers_ND = dense_ND.double() if dense_ND is not None and dense_ND.shape[1] else None
    slopes_D = torch.zeros(0 if dense_ND is None else dense_ND.shape[1], dtype=torch.float64)
    for _ in range(sweeps):
        largest = 0.0
        for ids_N, weight in zip(ids, weights):
            p_N = logits_N.sigmoid()
            # Ids of one row move its logit together: smaller steps keep their sum from overshooting.
            most = ids_N.shape[1] if ids_N.ndim == 2 else 1
            slope = _totals(ids_N, labels_N - p_N, len(weight)) - ridge * weight
            curvature = _totals(ids_N, p_N * (1 - p_N), len(weight)) * most + ridge
            change = slope / curvature
            weight += change
            logits_N += _looked_up(change, ids_N)
            largest = max(largest, float(change.abs().max()))
        if numbers_ND is not None:
            p_N = logits_N.sigmoid()
            slope = numbers_ND.T @ (labels_N - p_N) - ridge * slopes_D
            curved = numbers_ND.T @ (numbers_ND * (p_N * (1 - p_N)).unsqueeze(1))
            change = torch.linalg.solve(curved + ridge * torch.eye(len(slopes_D), dtype=torch.float64), slope)
            slopes_D += change
            logits_N += numbers_ND @ change
            largest = max(largest, float(change.abs().max()))
        p_N = logits_N.sigmoid()
        shift = (labels_N - p_N).sum() / (p_N * (1 - p_N)).sum().clamp_min(1e-12)
        intercept = intercept + shift
        logits_N += shift
        if max(largest, abs(float(shift))) < tolerance:
            break
    return Additive(intercept=intercept, weights=weights, slopes_D=slopes_D)


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


ClickRule = Callable[[FeatureRows], Tensor]
"""Logits of click rows."""


def click_rules(train: FeatureRows, *, user: str | None, item: str | None) -> dict[str, ClickRule]:
    """Rules and models of the same features, fitted on training rows: the majority class, biases of user and item or
    else of every category, logistic regression, and gradient boosting if scikit-learn is installed."""
    rate = float(train.labels_N.double().mean())
    rules: dict[str, ClickRule] = {"majority": lambda rows: majority(rate, len(rows.labels_N))}
    if item is not None:
        rules["item_bias"] = _additive(train, [item])
    if user is not None and item is not None:
        rules["user_item_bias"] = _additive(train, [user, item])
    elif len(train.ids) > 1 or train.dense_ND.shape[1]:
        rules["category_bias"] = _additive(train, list(train.ids), sweeps=20, tolerance=1e-4)
    logistic = fit_additive(list(train.ids.values()), train.labels_N, train.dense_ND, sweeps=20, tolerance=1e-4)
    rules["logistic"] = lambda rows: logistic([rows.ids[key] for key in train.ids], rows.dense_ND)
    boosted = boosting.of_clicks(train)
    return rules if boosted is None else {**rules, "gradient_boosting": boosted}


def _additive(train: FeatureRows, keys: list[str], **settings: Any) -> ClickRule:
    fitted = fit_additive([train.ids[key] for key in keys], train.labels_N, **settings)
    return lambda rows: fitted([rows.ids[key] for key in keys])
