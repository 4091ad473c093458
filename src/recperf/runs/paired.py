"""How models differ on the users, or rows, that they were all scored on, from what their runs recorded. Torch-free.

Each user counts for every model in the same replicates, so that what makes users easy or hard is no part of a
difference.

Shapes: U users, S seeds, R replicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..tasks import NDCG, RANKED
from .derive import difference_to
from .evidence import Evidence
from .result import Difference, Metrics
from .schemas import SampledRanking, SampledScores, SavedScores

Longs = NDArray[np.int64]
TOP, REPLICATES = 10, 200
FEWEST = 20
"""Users that models must have ranked items for together, so that they are compared."""


class Measured(NamedTuple):
    """A metric of a model or of a baseline."""

    value: float
    seeds: list[list[float]]
    """Its replicates, by seed."""


Row = dict[str, Measured]
"""The metrics of a model or of a baseline, by name."""


@dataclass(frozen=True, eq=False)
class RankedUsers:
    """The ranks of the held-out items of users, by seed."""

    keys_U: Longs
    ranks_SU: Longs

    @staticmethod
    def of(keys: Sequence[int], seeds: Sequence[SampledRanking]) -> RankedUsers | None:
        """None where no ranks were recorded."""
        if not keys or not seeds or any(len(seed.ranks) != len(keys) for seed in seeds):
            return None
        return RankedUsers(np.array(keys, np.int64), np.array([seed.ranks for seed in seeds], np.int64))

    def row(self, keys: Longs) -> Row:
        """The metrics over some of the users, each drawn with replacement: of as many users always in the same way."""
        order_U, users = np.argsort(self.keys_U), len(keys)
        ranks_SU = self.ranks_SU[:, order_U[np.searchsorted(self.keys_U[order_U], keys)]]
        inside_SU = ranks_SU <= TOP
        weights_RU = np.random.default_rng(users).multinomial(users, np.full(users, 1 / users), REPLICATES) / users
        gains = {NDCG: inside_SU / np.log2(1 + ranks_SU), RANKED[1]: inside_SU.astype(np.float64)}
        return {name: Measured(float(gain.mean()), (gain @ weights_RU.T).tolist()) for name, gain in gains.items()}


def common(sides: Iterable[RankedUsers]) -> Longs:
    """The keys of the users that all have."""
    keys: Any = reduce(np.intersect1d, (one.keys_U for one in sides))
    return np.asarray(keys, np.int64)


def labels(metrics: Metrics, seeds: Sequence[SampledScores]) -> Row:
    """The metrics of labels that have replicates."""
    names = [name for name in (seeds[0].replicates if seeds else ()) if name in metrics]
    return {name: Measured(metrics[name], [seed.replicates[name] for seed in seeds]) for name in names}


def scored_seeds(scores: SavedScores) -> list[SampledScores]:
    """The seeds that were scored on the rows that the baselines were scored on."""
    return [seed for seed in scores.seeds.values() if seed.rows_digest == scores.rows_digest]


def ranked_users(scores: SavedScores) -> RankedUsers | None:
    """The ranks by the model of a run."""
    seeds = [seed.ranking for seed in scored_seeds(scores) if seed.ranking]
    return RankedUsers.of(scores.ranking.keys, seeds) if scores.ranking else None


def candidates(scores: SavedScores) -> tuple[int, bool | None] | None:
    """Among which items a held-out one was ranked: how many were drawn, 0 for all, and whether those that the user took
    before are among them."""
    return (scores.ranking.negatives, scores.ranking.repeats) if scores.ranking else None


def difference(metric: str, other: str, one: Row, others: Row, *, units: int, by: str = "users") -> Difference:
    """A row less another one, of the same users or rows."""
    mine, theirs = one[metric], others[metric]
    return difference_to(other, metric, (mine.value, theirs.value), mine.seeds, theirs.seeds, units=units, by=by)


def differences(one: Evidence, other: Evidence) -> list[Difference]:
    """The second run less the first: of labels where both scored the same rows, and of ranked items over the users of
    both."""
    if not (one.has("scores.json") and other.has("scores.json")):
        return []
    first, second = (run.file("scores.json", SavedScores) for run in (one, other))
    found = []
    if first.rows_digest == second.rows_digest:
        before, after = (labels(run.result.quality.metrics, scored_seeds(scores))
                         for run, scores in ((one, first), (other, second)))  # fmt: skip
        found = [
            difference(name, one.short_name, after, before, units=first.units, by=first.by)
            for name in after
            if name in before
        ]
    sides = [ranked for scores in (first, second) if (ranked := ranked_users(scores))]
    if len(sides) < 2 or candidates(first) != candidates(second) or len(keys := common(sides)) < FEWEST:
        return found
    rows = [side.row(keys) for side in sides]
    return [*found, difference(NDCG, one.short_name, rows[1], rows[0], units=len(keys))]
