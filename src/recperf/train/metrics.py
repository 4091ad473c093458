"""Exact quality metrics of predicted probabilities, ties count half, and how far they may be off because other users
could have been scored.

Shapes: N samples, K bins of scores, Q ranked rows, G groups of users, R bootstrap replicates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

BINS = 100_000
CALIBRATION_BINS = 15


def auc(scores_N: Tensor, labels_N: Tensor) -> float:
    """Area under the ROC curve, ties count half; 0.5 when there is only one class."""
    positives = int(labels_N.sum())
    negatives = labels_N.numel() - positives
    if positives == 0 or negatives == 0:
        return 0.5
    _, where_N, counts = torch.unique(scores_N.double(), return_inverse=True, return_counts=True)
    # A tied group shares the mean of its ranks: those before it, plus half of itself and one half.
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2
    rank_sum = float(ranks[where_N][labels_N > 0].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def calibration_error(probabilities_N: Tensor, labels_N: Tensor) -> float:
    """Mean distance of predicted from observed rate over equal-width bins, weighted by their samples."""
    gap = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add_(
        0, _calibration_bin(probabilities_N), probabilities_N.double() - labels_N.double()
    )
    return float(gap.abs().sum()) / max(1, labels_N.numel())


def _calibration_bin(probabilities_N: Tensor) -> Tensor:
    return (probabilities_N.double() * CALIBRATION_BINS).long().clamp_(0, CALIBRATION_BINS - 1)


def reliability(logits_N: Tensor, labels_N: Tensor, bins: int = 10) -> list[dict[str, float]]:
    """Mean prediction and share of positives in bins of equally many rows, lowest predictions first."""
    order_N = logits_N.double().argsort(stable=True)
    parts = zip(logits_N.double().sigmoid()[order_N].chunk(bins), labels_N.double()[order_N].chunk(bins))
    return [
        {"predicted": float(predicted.mean()), "observed": float(observed.mean()), "rows": len(observed)}
        for predicted, observed in parts
    ]


def binary_metrics(logits_N: Tensor, labels_N: Tensor) -> dict[str, float]:
    """Accuracy at threshold 0.5, AUC, log loss, calibration (predicted over observed rate) and calibration error."""
    logits_N, labels_N = logits_N.detach().cpu().double(), labels_N.detach().cpu().double()
    probabilities_N = logits_N.sigmoid()
    return {
        "accuracy": float(((logits_N > 0) == (labels_N > 0)).double().mean()),
        "auc": auc(logits_N, labels_N),
        "log_loss": float(F.binary_cross_entropy_with_logits(logits_N, labels_N)),
        "calibration": float(probabilities_N.sum()) / max(1.0, float(labels_N.sum())),
        "calibration_error": calibration_error(probabilities_N, labels_N),
    }


def normalized_entropy(log_loss: float, rate: float) -> float:
    """Log loss divided by that of always predicting the observed rate; 1 when there is only one class."""
    if not 0 < rate < 1:
        return 1.0
    return log_loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


class Tally:
    """Running sums that give the metrics of predictions without storing them.

    They can be added over batches, epochs and ranks, in any order. AUC is that of probabilities in 100,000 bins, ties
    count half; counts are integers, exact in float64 up to 2^53. Only `metrics` waits for the device.
    """

    def __init__(self, *, bins: int = BINS, device: torch.device | str = "cpu") -> None:
        self.counts_2K = torch.zeros(2, bins, dtype=torch.float64, device=device)
        """Counts of negatives, then of positives, by predicted probability."""
        self.sums_2 = torch.zeros(2, dtype=torch.float64, device=device)
        """Sums of the log loss and of correct predictions."""

    @torch.no_grad()
    def add(self, logits_N: Tensor, labels_N: Tensor) -> None:
        logits_N, labels_N = logits_N.detach().double(), labels_N.detach().double()
        bins, positive_N = self.counts_2K.shape[1], labels_N > 0
        # A NaN logit falls into some bin; the loss is NaN too and ends the training.
        place_N = (logits_N.sigmoid() * bins).long().clamp_(0, bins - 1)
        self.counts_2K.view(-1).index_add_(0, place_N + bins * positive_N, torch.ones_like(logits_N))
        self.sums_2[0] += F.binary_cross_entropy_with_logits(logits_N, labels_N, reduction="sum")
        self.sums_2[1] += ((logits_N > 0) == positive_N).sum()

    def merge(self, other: Tally) -> None:
        self.counts_2K += other.counts_2K.to(self.counts_2K.device)
        self.sums_2 += other.sums_2.to(self.sums_2.device)

    def clear(self) -> None:
        self.counts_2K.zero_()
        self.sums_2.zero_()

    def auc(self) -> float:
        # On the host: a cumulative sum on a GPU varies with the order of its additions.
        negatives_1K, positives_1K = self.counts_2K.cpu().unsqueeze(1)
        return float(binned_auc(negatives_1K, positives_1K))

    def metrics(self) -> dict[str, float] | None:
        """AUC, log loss, normalized entropy and accuracy of all added predictions; none without any."""
        _, positives = self.counts_2K.sum(1).tolist()
        count = float(self.counts_2K.sum())
        if not count:
            return None
        loss, accuracy = (float(total) / count for total in self.sums_2)
        return {
            "auc": self.auc(),
            "log_loss": loss,
            "normalized_entropy": normalized_entropy(loss, positives / count),
            "accuracy": accuracy,
        }

    def state(self) -> dict[str, Tensor]:
        """The sums, without the bins that are empty."""
        counts = self.counts_2K.view(-1)
        places = counts.nonzero().squeeze(1)
        return {"places": places, "counts": counts[places], "sums": self.sums_2.clone()}

    def load(self, state: dict[str, Tensor]) -> None:
        self.clear()
        device = self.sums_2.device
        self.counts_2K.view(-1)[state["places"].to(device)] = state["counts"].to(device)
        self.sums_2.copy_(state["sums"])


REPLICATES = 200
GROUPS = 2048
"""More users than this are resampled in this many random groups: the time does not depend on the number of rows."""
INTERVAL_BINS = 4096
"""Replicates of the AUC compare scores in at most this many bins of about equally many rows."""


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
        hidden = auc(logits_N, labels_N) - float(binned_auc(whole_2K[:1], whole_2K[1:]))
        values_R = (binned_auc(negatives_RK.double(), positives_RK.double()) + hidden).clamp_(0, 1)
        return [float(value) for value in values_R]

    def probabilities(self, logits_N: Tensor, labels_N: Tensor) -> dict[str, list[float]]:
        """The log loss and the calibration error in each replicate."""
        logits_N, labels_N = logits_N.detach().cpu().double(), labels_N.cpu().double()
        losses_N = F.binary_cross_entropy_with_logits(logits_N, labels_N, reduction="none")
        probabilities_N, groups = logits_N.sigmoid(), self.weights_RG.shape[1]
        place_N = self.groups_N * CALIBRATION_BINS + _calibration_bin(probabilities_N)
        gaps_GK = torch.bincount(place_N, probabilities_N - labels_N, groups * CALIBRATION_BINS)
        weights_RG, rows_G = self.weights_RG.double(), torch.bincount(self.groups_N, minlength=groups).double()
        gaps_R = (weights_RG @ gaps_GK.view(groups, CALIBRATION_BINS)).abs().sum(1)
        error_R = gaps_R / (weights_RG @ rows_G).clamp_min(1)
        return {"log_loss": self.mean(losses_N, torch.arange(len(losses_N))), "calibration_error": error_R.tolist()}

    def of_labels(self, logits_N: Tensor, labels_N: Tensor) -> dict[str, list[float]]:
        """The AUC, the log loss and the calibration error in each replicate."""
        return {"auc": self.auc(logits_N, labels_N), **self.probabilities(logits_N, labels_N)}

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
    if len(distinct) <= INTERVAL_BINS:
        return where_N, len(distinct)
    before = counts.cumsum(0) - counts
    return (before * INTERVAL_BINS // len(scores_N))[where_N], INTERVAL_BINS


def binned_auc(negatives_RK: Tensor, positives_RK: Tensor) -> Tensor:
    """The AUC of each row of counts by ascending score; 0.5 where one class is missing."""
    pairs_R = negatives_RK.sum(1) * positives_RK.sum(1)
    below_RK = negatives_RK.cumsum(1) - negatives_RK / 2
    auc_R = (positives_RK * below_RK).sum(1) / pairs_R.clamp_min(1)
    return torch.where(pairs_R > 0, auc_R, torch.full_like(auc_R, 0.5))
