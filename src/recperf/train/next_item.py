"""How well next-item models rank: the rank of each target in the whole catalogue, metrics over users with intervals,
and what the recommended lists are like.

Shapes: N targets, B targets of a batch, I items (column k is item k + 1), K items of a list, P pairs, R replicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.next_item import NextItemData, Targets
from ..stop import poll
from .metrics import Resampling
from .ranking import TOP, gains

Seen = Literal["left-out", "kept"]
"""Whether items of a user's history can be recommended again."""
SCORES = 1 << 22
"""Scores that are held at a time."""
INTERVAL = (0.025, 0.975)
REPEATS = 0.05
"""Items of the history are kept by default where more than this share of the training events are repeats."""

Longs = NDArray[np.int64]
Scorer = Callable[[Targets], Tensor]
"""Scores of items 1 and up for the history before each target, a row for each, on any device."""


@dataclass(frozen=True, eq=False)
class Ranked:
    """The rank of every target, from 1 on, and the items recommended to its user."""

    ranks_N: Tensor
    lists_NK: Tensor
    """Item numbers; 0 where fewer than K items are left."""
    seen: Seen

    def gains(self, top: int = TOP) -> dict[str, Tensor]:
        """Hit, discounted gain and reciprocal rank of each target."""
        return gains(self.ranks_N - 1, torch.zeros_like(self.ranks_N), top)

    def metrics(self, top: int = TOP) -> dict[str, float]:
        """Hit rate and NDCG in the first `top` places, and MRR: means over users."""
        return {name: float(gain_N.mean()) for name, gain_N in self.gains(top).items()}

    def intervals(self, top: int = TOP) -> dict[str, tuple[float, float]]:
        """The 95 % bootstrap interval of each metric over users."""
        return {name: interval(values_R) for name, values_R in self.replicates(top).items()}

    def replicates(self, top: int = TOP) -> dict[str, Tensor]:
        """Each metric in bootstrap replicates, which are the same users for all models that rank the same targets."""
        resampling = Resampling(len(self.ranks_N))
        every = torch.arange(len(self.ranks_N))
        return {name: torch.tensor(resampling.mean(gain_N, every)) for name, gain_N in self.gains(top).items()}


def interval(values_R: Tensor) -> tuple[float, float]:
    low, high = torch.quantile(values_R.double(), torch.tensor(INTERVAL, dtype=torch.float64)).tolist()
    return low, high


def rank(data: NextItemData, targets: Targets, score: Scorer, *, seen: Seen | None = None, top: int = TOP) -> Ranked:
    """Rank all items for each target. Items with the score of the target count as ranked before it, and so do NaNs; a
    target that is left out because its user has met it comes last."""
    seen = seen or seen_by_default(data)
    together = max(1, SCORES // max(1, data.items))
    ranks, lists = [torch.zeros(0, dtype=torch.int64)], [torch.zeros((0, min(top, data.items)), dtype=torch.int64)]
    for first in range(0, len(targets), together):
        poll()
        part = Targets(targets.users_N[first : first + together], targets.positions_N[first : first + together])
        scores_BI = score(part)
        if seen == "left-out":
            rows_P, events_P = histories(data, part)
            codes_P = torch.from_numpy(rows_P * data.items + data.items_E[events_P] - 1).to(scores_BI.device)
            scores_BI = scores_BI.contiguous().view(-1).index_fill(0, codes_P, -torch.inf).view(scores_BI.shape)
        targets_B = torch.from_numpy(data.items_E[part.positions_N].astype(np.int64)).to(scores_BI.device) - 1
        ranks.append(ranks_of(scores_BI, targets_B).cpu())
        lists.append(lists_of(scores_BI, top).cpu())
    return Ranked(torch.cat(ranks), torch.cat(lists), seen)


def ranks_of(scores_BI: Tensor, targets_B: Tensor) -> Tensor:
    """The rank of a column of each row, from 1 on; columns that do not score lower come before it."""
    own_B1 = scores_BI.gather(1, targets_B[:, None])
    return scores_BI.shape[1] - (scores_BI < own_B1).sum(1)


def lists_of(scores_BI: Tensor, top: int) -> Tensor:
    """The items with the highest scores, the highest first; 0 for a score of -inf."""
    scores_BK, columns_BK = scores_BI.topk(min(top, scores_BI.shape[1]), dim=1)
    return torch.where(scores_BK > -torch.inf, columns_BK + 1, 0)


def histories(data: NextItemData, targets: Targets, last: int | None = None) -> tuple[Longs, Longs]:
    """The target and the place of every event before each target, or of the `last` ones, in the order of time."""
    begins_N, ends_N = data.offsets_U1[targets.users_N], targets.positions_N
    if last is not None:
        begins_N = np.maximum(begins_N, ends_N - last)
    lengths_N = ends_N - begins_N
    rows_P = np.repeat(np.arange(len(targets)), lengths_N)
    shifts_N = begins_N - (np.cumsum(lengths_N) - lengths_N)
    return rows_P, np.arange(len(rows_P)) + shifts_N[rows_P]


def seen_by_default(data: NextItemData) -> Seen:
    """Items that users have met are left out, unless the training events show that users take items again."""
    rows_P, events_P = histories(data, after_training(data))
    if not len(rows_P):
        return "left-out"
    repeats = 1 - len(np.unique(rows_P * (data.items + 1) + data.items_E[events_P])) / len(rows_P)
    return "kept" if repeats > REPEATS else "left-out"


def after_training(data: NextItemData) -> Targets:
    """The places right after the training events of each user, whose histories are all training events."""
    train = data.train()
    return Targets(train.users_S, train.ends_S)


def item_counts(data: NextItemData) -> NDArray[np.int64]:
    """How many training events each item has, by column."""
    _, events_P = histories(data, after_training(data))
    return np.bincount(data.items_E[events_P], minlength=data.items + 1)[1:]
