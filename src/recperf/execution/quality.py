"""What a run records of predictions beside their metrics: bootstrap replicates of the model and of the baselines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from ..distributed.ranks import Ranks
from ..runs.quality import LEAKED_AUC, few_rows
from ..runs.record import Run
from ..runs.result import Baselines
from ..runs.schemas import Scores
from ..train.intervals import Resampling
from ..train.metrics import auc, binary_metrics
from .workload import MOST_ROWS, Predictions, Prepared, ScoredRows, Trial

FILE = "scores.json"


class Assessment:
    """The scores of a run's baselines and trained seeds, kept in scores.json as they come."""

    def __init__(self, run: Run, world: Ranks, prepared: Prepared, notice: Callable[[str], None]) -> None:
        self.run, self.world, self.prepared, self.notice = run, world, prepared, notice
        if text := few_rows(prepared.data["valid_rows"]):
            notice(text)

    def baselines(self) -> dict[str, Any]:
        """Metrics of the baselines, from baselines.json where an earlier process wrote it."""
        metrics = self.run.read("baselines.json", Baselines)
        scores = self.run.read(FILE, Scores)
        if metrics is None or scores is None:
            computed, scores = self.world.on_leader(lambda: self._baselines(metrics))
            self.run.write(FILE, scores)
            if metrics is None:
                metrics = computed
                self.run.write("baselines.json", metrics)
        return dict(metrics)

    def _baselines(self, metrics: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
        rows, logits = self.prepared.scored_rows(), self.prepared.baseline_logits()
        resampling = _resampling(rows)
        scores: dict[str, Any] = {
            "rows": len(rows.labels_N),
            "rows_digest": _digest(rows),
            "by": resampling.by if resampling else "rows",
            "units": resampling.units if resampling else len(rows.labels_N),
            "baselines": {},
            "seeds": {},
        }
        if resampling:
            scores["baselines"] = {
                name: _sampled(resampling, logits_N, rows.labels_N) for name, logits_N in logits.items()
            }
        if metrics is None:
            metrics = {name: binary_metrics(logits_N, rows.labels_N) for name, logits_N in logits.items()}
        return metrics, scores

    def trained(self, seed: int, trial: Trial, predictions: Predictions) -> None:
        """Record the predictions of a trained model."""
        scores = self.run.read(FILE, Scores)
        assert scores is not None
        recorded = self.world.on_leader(lambda: self._trained(predictions))
        if recorded is None:
            return
        scores["seeds"][str(seed)] = recorded
        if recorded["auc"] > LEAKED_AUC and "strongest_feature" not in scores:
            strongest = self.prepared.strongest_feature()
            if strongest:
                scores["strongest_feature"] = {"name": strongest[0], "auc": strongest[1]}
        self.run.write(FILE, scores)

    def _trained(self, predictions: Predictions) -> dict[str, Any] | None:
        rows = ScoredRows(predictions.labels_N, predictions.users_N, predictions.items_N)
        resampling = _resampling(rows)
        if resampling is None:
            return None
        return {**_sampled(resampling, predictions.logits_N, rows.labels_N), "rows_digest": _digest(rows)}


def _resampling(rows: ScoredRows) -> Resampling | None:
    return None if len(rows.labels_N) > MOST_ROWS else Resampling(len(rows.labels_N), rows.users_N)


def _sampled(resampling: Resampling, logits_N: Tensor, labels_N: Tensor) -> dict[str, Any]:
    return {"auc": auc(logits_N, labels_N), "auc_replicates": resampling.auc(logits_N, labels_N)}


def _digest(rows: ScoredRows) -> str:
    """Tells whether two models were scored on the same rows in the same order."""
    digest = hashlib.sha256(np.packbits(rows.labels_N.numpy() > 0).tobytes())
    if rows.users_N is not None:
        digest.update(rows.users_N.numpy().tobytes())
    return digest.hexdigest()
