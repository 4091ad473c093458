"""A trial of ratings: the probability that micro-dlrm's model predicts, from 0 to 1, stands for 1 to 5 stars.

Shapes: N rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..data.clicks import Clicks
from ..data.order import Samples
from ..data.rows import Rows, Split
from ..execution.quality import Assessment, Scoring
from ..execution.workload import Predictions
from ..models.mlp import make_loss
from ..train.metrics import Resampling
from .clicks import StoredRows
from .micro_dlrm.build import ClickTrial, PreparedClicks
from .micro_dlrm.config import rows_of
from .ratings import RatingsConfig, bounds

STARS = 4
"""From the lowest to the highest rating."""


def errors(logits_N: Tensor, labels_N: Tensor) -> Tensor:
    """Predicted stars less those of the label."""
    return STARS * logits_N.detach().cpu().double().sigmoid() - labels_N.cpu().double()


def rmse(logits_N: Tensor, labels_N: Tensor) -> float:
    return float(errors(logits_N, labels_N).square().mean().sqrt())


def rating_metrics(logits_N: Tensor, labels_N: Tensor) -> dict[str, float]:
    return {"rmse": rmse(logits_N, labels_N), "mae": float(errors(logits_N, labels_N).abs().mean())}


def replicates(resampling: Resampling, logits_N: Tensor, labels_N: Tensor) -> dict[str, list[float]]:
    errors_N, rows_N = errors(logits_N, labels_N), torch.arange(len(labels_N))
    squares = resampling.mean(errors_N.square(), rows_N)
    return {"rmse": [value**0.5 for value in squares], "mae": resampling.mean(errors_N.abs(), rows_N)}


class RatingAssessment(Assessment):
    scoring = Scoring(metrics=rating_metrics, leading=rmse, replicates=replicates)


class Ratings(StoredRows):
    """Rows whose label is the number of stars above one."""

    def __init__(self, config: RatingsConfig, device: torch.device) -> None:
        clicks = rows_of(config)
        assert isinstance(clicks, Clicks)
        rows, stars_N = clicks.rows, clicks.ratings.rating - 1
        clicks.rows = Rows(rows.dense_ND, rows.ids_NS, stars_N.astype(np.uint8))
        super().__init__(clicks, device)

    def samples(self, split: Split) -> Samples:
        samples = super().samples(split)
        return replace(samples, labels_N=samples.labels_N / STARS)

    def baseline_logits(self) -> dict[str, Tensor]:
        logits = super().baseline_logits()
        return {"mean": logits.pop("majority"), **logits}


class PreparedRatings(PreparedClicks):
    def __init__(self, config: RatingsConfig) -> None:
        super().__init__(config)
        self.source, self.target = Ratings(config, self.settings.device), bounds(config)
        self.train = self.source.samples("fit")

    def trial(self, seed: int) -> ClickTrial:
        return RatingTrial(self, seed)


class RatingTrial(ClickTrial):
    def __init__(self, prepared: PreparedRatings, seed: int) -> None:
        super().__init__(prepared, seed)
        self.model.criterion = make_loss("mse")

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        return rating_metrics(predictions.logits_N, predictions.labels_N)
