"""Ranks a held-out item of each user among the items of the catalogue, by a trained model and by simple rules.

Shapes: N scored rows, Q ranked rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..stop import poll
from ..train.intervals import Resampling
from ..train.ranking import Scorer, drawn, first_positives, gains, joint, positions
from .workload import Catalogue, RankingConfig, ScoredRows

SHARE = 0.2
"""Ranking by default adds at most this to the counted work of the training."""
STEP_PASSES = 3
"""A training step has about the work of so many forward passes."""
REPEATS = 0.05
"""Items that a user already has compete where more than this share of the training rows are repeats."""
LEAST_USERS, MOST_USERS, LEAST_NEGATIVES = 100, 10_000, 100


@dataclass(frozen=True, eq=False)
class RankedRows:
    """Which rows are ranked, and among which items."""

    rows_Q: Tensor
    negatives: int
    """Items that are drawn for each; 0: the whole catalogue."""
    catalogue: Catalogue
    items_N: Tensor
    repeats: bool
    """Whether items that a row's user already has compete."""
    meeting_is: str | None
    """What says how likely users meet items; None: candidates are ranked by predicted labels alone."""

    @staticmethod
    def choose(config: RankingConfig, trained: int, rows: ScoredRows, catalogue: Catalogue) -> RankedRows | str:
        """The rows that the config asks for, or why none are ranked; `trained` samples are trained on in all."""
        if config.users == 0:
            return "ranking.users is 0"
        if catalogue.not_ranked:
            return catalogue.not_ranked
        assert rows.users_N is not None
        assert rows.items_N is not None
        rows_Q = first_positives(rows.labels_N, rows.users_N, rows.times_N)
        size, budget = len(catalogue.items_I), int(SHARE * STEP_PASSES * trained)
        if not len(rows_Q) or not size:
            return "no user has a positive held-out row" if size else "the catalogue is empty"
        users, negatives = config.users, config.negatives
        least = min(len(rows_Q), LEAST_USERS)
        if negatives is None:
            negatives = 0
            if users is None and budget // size < least:
                negatives = budget // least
        if users is None:
            users = min(MOST_USERS, budget // (min(negatives, size) or size))
            if users < least or 0 < negatives < min(size, LEAST_NEGATIVES):
                return f"it would add more than {SHARE:.0%} to the work of this training (--ranking.users {least})"
        negatives, repeats = negatives if negatives < size else 0, catalogue.repeats > REPEATS
        return RankedRows(rows_Q[:users], negatives, catalogue, rows.items_N, repeats, catalogue.meeting_is)

    def candidates(self) -> Iterator[Tensor]:
        """The items that each row's own competes with. Whether those that its user already has are among them is
        decided once for all rows: a choice by the row's own item would give it away."""
        for row in self.rows_Q.tolist():
            poll()
            items_I = self.catalogue.items_I
            if not self.repeats:
                items_I = items_I[~torch.isin(items_I, self.catalogue.seen(row))]
            yield drawn(items_I, self.negatives, row) if self.negatives else items_I

    def facts(self) -> dict[str, Any]:
        return {
            "users": len(self.rows_Q),
            "catalogue": len(self.catalogue.items_I),
            "negatives": self.negatives,
            "repeats": self.repeats,
            "meeting": self.meeting_is,
        }

    def ranked(
        self, score: Scorer, resampling: Resampling, segments: dict[str, Tensor], *, predicts_labels: bool
    ) -> dict[str, Any]:
        """Metrics, those of each segment of the scored rows, and replicates of the NDCG."""
        if predicts_labels and self.meeting_is is not None:
            score = joint(score, self.catalogue.meeting)
        targets_Q = self.items_N[self.rows_Q]
        own_Q = score(self.rows_Q, targets_Q).double().cpu()
        higher_Q, same_Q = positions(score, self.rows_Q, own_Q, targets_Q, self.candidates())
        gain = gains(higher_Q, same_Q)
        by_segment = {}
        for name, inside_N in segments.items():
            inside_Q = inside_N[self.rows_Q]
            if bool(inside_Q.any()):
                by_segment[name] = {metric: float(gain_Q[inside_Q].mean()) for metric, gain_Q in gain.items()}
        ndcg = next(name for name in gain if name.startswith("ndcg"))
        return {
            "metrics": {name: float(gain_Q.mean()) for name, gain_Q in gain.items()},
            "segments": by_segment,
            "ndcg_replicates": resampling.mean(gain[ndcg], self.rows_Q),
        }
