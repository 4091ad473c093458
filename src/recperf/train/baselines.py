"""Simple baselines, fitted on training rows and scored on the rows a model is scored on.

Shapes: N samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..data.order import Samples
from ..data.random_bags import RandomBags


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
    train_ids: list[Tensor], labels_N: Tensor, valid_ids: list[Tensor], *, ridge: float = 2.0, sweeps: int = 60
) -> Tensor:
    """Logistic regression with an intercept and one weight for each id, penalised by ridge / 2 * weight^2.

    Newton steps, one group of weights at a time: within a group the problem splits into one-dimensional ones.
    """
    labels_N = labels_N.double()
    rows = [int(max(a.max(), b.max())) + 1 for a, b in zip(train_ids, valid_ids)]
    weights = [torch.zeros(count, dtype=torch.float64) for count in rows]
    intercept = majority(float(labels_N.mean()), 1)[0]
    logits_N = intercept.expand_as(labels_N).clone()
    for _ in range(sweeps):
        largest = 0.0
        for ids, weight in zip(train_ids, weights):
            p_N = logits_N.sigmoid()
            slope = torch.bincount(ids, labels_N - p_N, len(weight)) - ridge * weight
            curvature = torch.bincount(ids, p_N * (1 - p_N), len(weight)) + ridge
            change = slope / curvature
            weight += change
            logits_N += change[ids]
            largest = max(largest, float(change.abs().max()))
        p_N = logits_N.sigmoid()
        shift = (labels_N - p_N).sum() / (p_N * (1 - p_N)).sum().clamp_min(1e-12)
        intercept = intercept + shift
        logits_N += shift
        if max(largest, abs(float(shift))) < 1e-6:
            break
    result = intercept.expand(len(valid_ids[0])).clone()
    for ids, weight in zip(valid_ids, weights):
        result += weight[ids]
    return result
