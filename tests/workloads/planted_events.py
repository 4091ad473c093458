"""Made-up logs in which it is known what decides a label, and so the best AUC that any model can reach.

Shapes: N events, I items.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recperf.data.yambda.import_options import ImportOptions
from recperf.data.yambda.imports import import_events

Effect = Literal["last item", "none"]
DAYS = 90
STRENGTH = 2.0
"""Standard deviation of the log odds of the groups."""


@dataclass(frozen=True, eq=False)
class PlantedLog:
    """Events of users in the order of time, and the true probability of each positive label."""

    users_N: NDArray[np.int64]
    items_N: NDArray[np.int64]
    times_N: NDArray[np.int64]
    labels_N: NDArray[np.bool_]
    probabilities_N: NDArray[np.float64]

    def possible_auc(self, held_out: float = 0.2) -> float:
        """The expected AUC of the true probabilities on the latest events."""
        latest = self.times_N >= np.quantile(self.times_N, 1 - held_out)
        values, place = np.unique(self.probabilities_N[latest], return_inverse=True)
        count = np.bincount(place)
        positive, negative = values * count, (1 - values) * count
        below = np.cumsum(negative) - negative
        return float((positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum()))

    def imported(self, folder: Path) -> Path:
        """The folder of an event store of the log."""
        rows = zip(self.users_N, self.items_N, self.times_N, self.labels_N.astype(int))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.csv").write_text(
            "\n".join(["user,item,time,label", *(f"{u},{i},{t},{y}" for u, i, t, y in rows)])
        )
        return import_events(ImportOptions(events=folder / "log.csv", label="label", name="planted"), folder / "store")


def planted(effect: Effect, *, events: int, users: int, items: int, groups: int, seed: int = 1) -> PlantedLog:
    """A log whose labels depend on the hidden groups of the item and of the one before it; without an effect, on the
    item and the user alone."""
    draw = np.random.default_rng(seed)
    users_N, items_N = np.sort(draw.integers(0, users, events)), draw.integers(0, items, events)
    times_N = draw.integers(0, DAYS * 86_400, events)
    times_N = times_N[np.lexsort((times_N, users_N))]
    group_N = draw.integers(0, groups, items)[items_N]
    before_N = np.full(events, groups)
    same_N = users_N[1:] == users_N[:-1]
    before_N[1:][same_N] = group_N[:-1][same_N]
    if effect == "last item":
        logits_N = draw.normal(0, STRENGTH, (groups, groups + 1))[group_N, before_N]
    else:
        logits_N = draw.normal(0, 0.8, items)[items_N] + draw.normal(0, 0.8, users)[users_N]
    probabilities_N = 1 / (1 + np.exp(-logits_N))
    return PlantedLog(users_N, items_N, times_N, draw.random(events) < probabilities_N, probabilities_N)
