"""Quality of predicted probabilities, exactly: no sampling, ties counted half.

Shapes: N samples.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def auc(scores_N: Tensor, labels_N: Tensor) -> float:
    """The chance that a positive scores above a negative, ties counted half; 0.5 when only one class is there."""
    positives = int(labels_N.sum())
    negatives = labels_N.numel() - positives
    if positives == 0 or negatives == 0:
        return 0.5
    _, where_N, counts = torch.unique(scores_N.double(), return_inverse=True, return_counts=True)
    # A tied group shares the mean of its ranks: those before it, plus half of itself and one half.
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2
    rank_sum = float(ranks[where_N][labels_N > 0].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def calibration_error(probabilities_N: Tensor, labels_N: Tensor, bins: int = 15) -> float:
    """Mean distance of predicted from observed rate over equal-width bins, weighted by how many samples fall in."""
    index_N = (probabilities_N.double() * bins).long().clamp_(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, index_N, probabilities_N.double() - labels_N.double())
    return float(gap.abs().sum()) / max(1, labels_N.numel())


def binary_metrics(logits_N: Tensor, labels_N: Tensor) -> dict[str, float]:
    """Accuracy at one half, AUC, log loss, and calibration: predicted over observed rate, and its error by bins."""
    logits_N, labels_N = logits_N.detach().cpu().double(), labels_N.detach().cpu().double()
    probabilities_N = logits_N.sigmoid()
    return {
        "accuracy": float(((logits_N > 0) == (labels_N > 0)).double().mean()),
        "auc": auc(logits_N, labels_N),
        "log_loss": float(F.binary_cross_entropy_with_logits(logits_N, labels_N)),
        "calibration": float(probabilities_N.sum()) / max(1.0, float(labels_N.sum())),
        "calibration_error": calibration_error(probabilities_N, labels_N),
    }
