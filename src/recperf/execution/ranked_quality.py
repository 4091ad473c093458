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
from .own_keys import keys_of, paired, rows_digest
from .quality import MOST_RECORDED, Assessment, recorded_ranks, timed
from .workload import Predictions, Prepared, Trial


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
            users=users,
            catalogue=targets.catalogue,
            negatives=0,
            repeats=targets.repeats,
            split=targets.split,
            keys=paired(*self._keys_Q)[:MOST_RECORDED].tolist(),
        )
        seeds = self._earlier.seeds if self._earlier else {}
        scores = SavedScores(users, self._digest, "users", users, seeds=seeds, ranking=ranking)
        for name, ranks_N in self.in_time(targets.baseline_ranks, scores):
            ranking.baselines[name] = self._recorded(ranks_N)
        return metrics or {name: recorded.metrics for name, recorded in ranking.baselines.items()}, scores

    def _trained(self, trial: Trial, predictions: Predictions) -> SampledScores | None:
        assert predictions.ranks_N is not None
        trial.recipe.model.train(False)
        with torch.no_grad():
            one_ms = timed(trial.recommender(), len(predictions.ranks_N))
        ranking = structs.replace(self._recorded(predictions.ranks_N), lists=dict(predictions.lists), one_ms=one_ms)
        return SampledScores(rows_digest=self._digest, ranking=ranking)

    def _recorded(self, ranks_N: Tensor) -> SampledRanking:
        return recorded_ranks(ranks_N[self._order_Q], self._resampling, {})

    @cached_property
    def _keys_N(self) -> tuple[Tensor, Tensor]:
        ids = (("user", self.targets.users_N), ("item", self.targets.items_N))
        users_N, items_N = (keys_of(ids_N, self.prepared.own_ids(role)) for role, ids_N in ids)
        return users_N, items_N

    @cached_property
    def _order_Q(self) -> Tensor:
        return self._keys_N[0].argsort()

    @property
    def _keys_Q(self) -> tuple[Tensor, Tensor]:
        """Of users and items, in the order of the users' keys."""
        users_N, items_N = self._keys_N
        return users_N[self._order_Q], items_N[self._order_Q]

    @cached_property
    def _resampling(self) -> Resampling:
        return Resampling(len(self._order_Q), self._keys_Q[0])

    @cached_property
    def _digest(self) -> str:
        return rows_digest(torch.ones(len(self._order_Q)), *self._keys_N)
