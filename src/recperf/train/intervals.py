"""How far a metric may be off because other users could have been scored: bootstrap replicates over users.

Shapes: N scored rows, Q ranked rows, G groups of users, R replicates, K score bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .metrics import auc

REPLICATES = 200
GROUPS = 2048
"""More users than this are resampled in so many random groups: the time does not depend on the number of rows."""
BINS = 4096
"""Replicates of the AUC compare scores in at most so many bins of about equally many rows."""


class Resampling:
    """Bootstrap replicates of scored rows: users, or rows where there are none, drawn with replacement.

    The draw depends only on the users of the rows, so the replicates of two models on the same rows are paired.
    """

    def __init__(self, rows: int, users_N: Tensor | None = None, *, replicates: int = REPLICATES) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.by = "rows" if users_N is None else "users"
        unit_N = torch.arange(rows) if users_N is None else torch.unique(users_N, return_inverse=True)[1]
        self.units = int(unit_N.max()) + 1 if rows else 0
        """Number of users, or of rows."""
        self.groups_N = unit_N
        groups = self.units
        if self.units > GROUPS:
            groups = GROUPS
            self.groups_N = (torch.randperm(self.units, generator=generator) % GROUPS)[unit_N]
        drawn_RG = torch.randint(max(1, groups), (replicates, groups), generator=generator)
        self.weights_RG = torch.zeros(replicates, groups).scatter_add_(1, drawn_RG, torch.ones_like(drawn_RG).float())
        """How often each group is in each replicate."""

    def auc(self, logits_N: Tensor, labels_N: Tensor) -> list[float]:
        """The AUC in each replicate; 0.5 where a replicate has one class only."""
        groups = self.weights_RG.shape[1]
        bin_N, bins = _bins(logits_N.detach().cpu().double())
        positive_N = labels_N.cpu() > 0
        place_N = (positive_N * groups + self.groups_N) * bins + bin_N
        counts_2GK = torch.bincount(place_N, minlength=2 * groups * bins).float().view(2, groups, bins)
        negatives_RK, positives_RK = (self.weights_RG @ counts_GK for counts_GK in counts_2GK)
        whole_2K = counts_2GK.sum(1, dtype=torch.float64)
        # What the bins hide of the AUC is the same in every replicate.
        hidden = auc(logits_N, labels_N) - float(_binned_auc(whole_2K[:1], whole_2K[1:]))
        values_R = (_binned_auc(negatives_RK.double(), positives_RK.double()) + hidden).clamp_(0, 1)
        return [float(value) for value in values_R]

    def mean(self, values_Q: Tensor, rows_Q: Tensor) -> list[float]:
        """The mean of a value of some rows in each replicate; of all of them where a replicate has none."""
        group_Q, groups = self.groups_N[rows_Q], self.weights_RG.shape[1]
        sums_G, count_G = (torch.bincount(group_Q, of_Q, groups).double() for of_Q in (values_Q.double(), None))
        weights_RG = self.weights_RG.double()
        total_R = weights_RG @ count_G
        mean_R = (weights_RG @ sums_G) / total_R.clamp_min(1)
        mean_R = torch.where(total_R > 0, mean_R, values_Q.double().mean())
        return [float(value) for value in mean_R]


def _bins(scores_N: Tensor) -> tuple[Tensor, int]:
    """A bin for each score, ascending: one for each distinct score, or bins of about equally many rows."""
    distinct, where_N, counts = torch.unique(scores_N, return_inverse=True, return_counts=True)
    if len(distinct) <= BINS:
        return where_N, len(distinct)
    before = counts.cumsum(0) - counts
    return (before * BINS // len(scores_N))[where_N], BINS


def _binned_auc(negatives_RK: Tensor, positives_RK: Tensor) -> Tensor:
    pairs_R = negatives_RK.sum(1) * positives_RK.sum(1)
    below_RK = negatives_RK.cumsum(1) - negatives_RK / 2
    auc_R = (positives_RK * below_RK).sum(1) / pairs_R.clamp_min(1)
    return torch.where(pairs_R > 0, auc_R, torch.full_like(auc_R, 0.5))
