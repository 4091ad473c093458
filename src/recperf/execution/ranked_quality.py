"""What a run of a workload that ranks all items records beside its metrics: those of the baselines, and bootstrap
replicates over users.

Shapes: N held-out items, one of each user.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from ..distributed.ranks import Ranks
from ..runs.record import Run
from ..runs.schemas import RankingFacts, SampledRanking, SampledScores, SavedScores
from ..train.metrics import Resampling
from .quality import Assessment, recorded_gains, rows_digest
from .workload import Predictions, Prepared, ScoredRows, Trial


class RankedAssessment(Assessment):
    """Ranks in place of labels; a replicate draws users with replacement, the same ones for every model."""

    def __init__(self, run: Run, world: Ranks, prepared: Prepared, notice: Callable[[str], None]) -> None:
        super().__init__(run, world, prepared, notice)
        targets = prepared.ranking()
        assert targets is not None
        self.targets = targets

    def _outdated(self) -> bool:
        return self._earlier is None

    def _baselines(self, metrics: dict[str, Any] | None) -> tuple[dict[str, Any], SavedScores]:
        targets = self.targets
        users = len(targets.users_N)
        ranking = RankingFacts(
            users=users, catalogue=targets.catalogue, negatives=0, repeats=targets.repeats, split=targets.split
        )
        seeds = self._earlier.seeds if self._earlier else {}
        scores = SavedScores(users, self._digest, "users", users, seeds=seeds, ranking=ranking)
        for name, ranks_N in self.in_time(targets.baseline_ranks, scores):
            ranking.baselines[name] = self._recorded(ranks_N)
        return metrics or {name: recorded.metrics for name, recorded in ranking.baselines.items()}, scores

    def _trained(self, trial: Trial, predictions: Predictions) -> SampledScores | None:
        assert predictions.ranks_N is not None
        ranking = structs.replace(self._recorded(predictions.ranks_N), lists=dict(predictions.lists))
        return SampledScores(rows_digest=self._digest, ranking=ranking)

    def _recorded(self, ranks_N: Tensor) -> SampledRanking:
        return recorded_gains(self.targets.gains(ranks_N), self._resampling, torch.arange(len(ranks_N)), {})

    @cached_property
    def _resampling(self) -> Resampling:
        return Resampling(len(self.targets.users_N), self.targets.users_N)

    @cached_property
    def _digest(self) -> str:
        users_N = self.targets.users_N
        return rows_digest(ScoredRows(torch.ones(len(users_N)), users_N))
