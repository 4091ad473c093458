"""How well next-item models rank: the rank of each target in the whole catalogue, metrics over users with intervals,
and baselines counted from the training events: popularity, recent popularity, what follows the last items, and items
of the same users (item-kNN).

Shapes: N targets, B targets of a batch, I items (column k is item k + 1), K items of a list, P pairs of a target and an
item of its history, R replicates, W entries of a sparse matrix, E events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.next_item import NextItemData, Targets
from ..stop import poll
from .ranking import TOP, gains

Seen = Literal["left-out", "kept"]
"""Whether items of a user's history can be recommended again."""
SCORES = 1 << 22
"""Scores that are held at a time."""
REPEATS = 0.05
"""Items of the history are kept by default where more than this share of the training events are repeats."""

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Scorer = Callable[[Targets], Tensor]
"""Scores of items 1 and up for the history before each target, a row for each, on any device."""


@dataclass(frozen=True, eq=False)
class Ranked:
    """The rank of every target, from 1 on, and the items recommended to its user."""

    ranks_N: Tensor
    lists_NK: Tensor
    """Item numbers; 0 where fewer than K items are left."""
    seen: Seen

    def metrics(self, top: int = TOP) -> dict[str, float]:
        """Hit rate and NDCG in the first `top` places, and MRR: means over users."""
        by_target = gains(self.ranks_N - 1, torch.zeros_like(self.ranks_N), top)
        return {name: float(gain_N.mean()) for name, gain_N in by_target.items()}


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
        own_B1 = scores_BI.gather(1, targets_B[:, None])
        ranks.append((data.items - (scores_BI < own_B1).sum(1)).cpu())
        scores_BK, columns_BK = scores_BI.topk(min(top, data.items), dim=1)
        lists.append(torch.where(scores_BK > -torch.inf, columns_BK + 1, 0).cpu())
    return Ranked(torch.cat(ranks), torch.cat(lists), seen)


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


LAST, DECAYS = 10, (0.5, 0.7, 0.85)
"""Items of a history that baselines look at, and how much less each earlier one may weigh; counts of what follows an
item also look that far, with these weights."""
DAMPINGS = (0.0, 0.5, 1.0)
"""Powers of an item's events that counts of what follows it are divided by: 0 favours frequent items, 1 rare ones."""
NEIGHBOURS = 100
"""Similar items that each item has in item-kNN."""
MOST_PAIRS = 10_000_000
"""Pairs of items of one user that item-kNN counts; of longer histories the latest items count."""
BINS = 1 << 26
ENTRIES = 1 << 22
"""Entries of a matrix that are added up at a time."""
HALVINGS = 12
"""Lengths of time that recent popularity compares."""
COMPARED = 1000
"""Validation targets on which the settings of a baseline are compared."""


def baselines(data: NextItemData) -> dict[str, Scorer]:
    """All baselines that the data allows, their settings chosen on validation targets. Without times there is no recent
    popularity."""
    popularity_I = torch.from_numpy(item_counts(data).astype(np.float64))
    scorers: dict[str, Scorer] = {"popularity": lambda targets: popularity_I.expand(len(targets), -1)}
    if data.times_E is not None:
        scorers["recent_popularity"] = _best(data, RecentPopularity.options(data))
    scorers["item_to_item"] = _best(data, [option for decay in DECAYS for option in following(data, decay)])
    alike = neighbours(data)
    scorers["item_knn"] = _best(data, [replace(alike, decay=decay) for decay in DECAYS])
    return scorers


def _best(data: NextItemData, options: Sequence[Scorer]) -> Scorer:
    """The option with the highest mean reciprocal rank of validation targets."""
    targets = data.validation()
    step = max(1, -(-len(targets) // COMPARED))
    compared, seen = Targets(targets.users_N[::step], targets.positions_N[::step]), seen_by_default(data)
    return max(options, key=lambda option: rank(data, compared, option, seen=seen).metrics()["mrr"])


@dataclass(frozen=True, eq=False)
class ItemToItem:
    """Adds up rows of a sparse matrix of items for the last items of a history, of which earlier ones weigh less."""

    data: NextItemData
    offsets_I1: Longs
    columns_W: Longs
    weights_W: Floats
    decay: float

    @staticmethod
    def of(data: NextItemData, codes_W: Longs, weights_W: Floats, decay: float) -> ItemToItem:
        """Codes are row * items + column, ascending."""
        rows_W, columns_W = np.divmod(codes_W, data.items)
        offsets_I1 = np.searchsorted(rows_W, np.arange(data.items + 1))
        return ItemToItem(data, offsets_I1, columns_W, weights_W, decay)

    def __call__(self, targets: Targets) -> Tensor:
        scores_BI = np.zeros(len(targets) * self.data.items)
        rows_P, events_P = histories(self.data, targets, LAST)
        columns_P = self.data.items_E[events_P] - 1
        weights_P = self.decay ** (targets.positions_N[rows_P] - 1 - events_P)
        begins_P, lengths_P = self.offsets_I1[columns_P], np.diff(self.offsets_I1)[columns_P]
        upto_P = np.cumsum(lengths_P)
        first = 0
        while first < len(rows_P):
            before = upto_P[first] - lengths_P[first]
            stop = max(first + 1, int(np.searchsorted(upto_P, before + ENTRIES, side="right")))
            part_P = np.repeat(np.arange(first, stop), lengths_P[first:stop])
            entries = np.arange(len(part_P)) + (begins_P - (upto_P - lengths_P) + before)[part_P]
            places = rows_P[part_P] * self.data.items + self.columns_W[entries]
            low = int(rows_P[first]) * self.data.items
            added = np.bincount(places - low, self.weights_W[entries] * weights_P[part_P])
            scores_BI[low : low + len(added)] += added
            first = stop
        return torch.from_numpy(scores_BI.reshape(len(targets), self.data.items))


def following(data: NextItemData, decay: float) -> list[ItemToItem]:
    """How often each item came soon after another, divided by each power of how often that was."""
    rows_P, events_P = histories(data, after_training(data))
    columns_P, codes, weights = data.items_E[events_P].astype(np.int64) - 1, [], []
    for distance in range(1, LAST + 1):
        same = np.flatnonzero(rows_P[distance:] == rows_P[:-distance])
        codes.append(columns_P[same] * data.items + columns_P[same + distance])
        weights.append(np.full(len(same), decay ** (distance - 1)))
    codes_W, counts_W = _summed(np.concatenate(codes), np.concatenate(weights), data.items)
    rows_W = codes_W // data.items
    events_W = np.bincount(rows_W, counts_W)[rows_W]
    return [ItemToItem.of(data, codes_W, counts_W / events_W**damping, decay) for damping in DAMPINGS]


def neighbours(data: NextItemData) -> ItemToItem:
    """The cosine of the sets of users of two items, of the most similar items of each."""
    train = data.train()
    last = int((train.ends_S - train.begins_S).max())
    while last > 1 and int((np.minimum(train.ends_S - train.begins_S, last) ** 2).sum()) > MOST_PAIRS:
        last -= max(1, last // 8)
    rows_P, events_P = histories(data, after_training(data), last)
    pairs_P = np.unique(rows_P * data.items + data.items_E[events_P] - 1)
    users_P, columns_P = np.divmod(pairs_P, data.items)
    events_I, lengths_U = np.bincount(columns_P, minlength=data.items), np.bincount(users_P)
    # Each item of a user with each item of the same user.
    others_P = lengths_U[users_P]
    one = np.repeat(np.arange(len(pairs_P)), others_P)
    other = (
        np.arange(len(one)) + (np.cumsum(lengths_U) - lengths_U)[users_P[one]] - (np.cumsum(others_P) - others_P)[one]
    )
    codes = (columns_P[one] * data.items + columns_P[other])[one != other]
    codes_W, counts_W = _summed(codes, np.ones(len(codes)), data.items)
    rows_W, columns_W = np.divmod(codes_W, data.items)
    cosine_W = counts_W / np.sqrt(events_I[rows_W] * events_I[columns_W])
    order_W = np.argsort(rows_W - cosine_W / 2, kind="stable")
    place_W = np.arange(len(order_W)) - np.searchsorted(rows_W, rows_W[order_W])
    kept_W = np.sort(order_W[place_W < NEIGHBOURS])
    return ItemToItem.of(data, codes_W[kept_W], cosine_W[kept_W], DECAYS[0])


def _summed(codes: Longs, weights: Floats, items: int) -> tuple[Longs, Floats]:
    """The different codes, ascending, and the sum of the weights of each."""
    if items * items > BINS:
        codes_W, places = np.unique(codes, return_inverse=True)
        return codes_W, np.bincount(places, weights).astype(np.float64)
    sums = np.bincount(codes, weights).astype(np.float64)
    codes_W = np.flatnonzero(sums).astype(np.int64)
    return codes_W, sums[codes_W]


@dataclass(frozen=True, eq=False)
class RecentPopularity:
    """Training events of each item in a time before the target."""

    data: NextItemData
    items_E: Longs
    times_E: Longs
    """In ascending order."""
    seconds: int

    @staticmethod
    def options(data: NextItemData) -> list[RecentPopularity]:
        """With the time of all events, half of it, and so on."""
        assert data.times_E is not None
        _, events_P = histories(data, after_training(data))
        events_P = events_P[np.argsort(data.times_E[events_P], kind="stable")]
        items_E, times_E = data.items_E[events_P].astype(np.int64) - 1, data.times_E[events_P]
        span = int(times_E[-1] - times_E[0]) + 1
        return [RecentPopularity(data, items_E, times_E, max(1, span >> halving)) for halving in range(HALVINGS)]

    def __call__(self, targets: Targets) -> Tensor:
        assert self.data.times_E is not None
        # With a split by time targets may come long after the last training event.
        moments_B = np.minimum(self.data.times_E[targets.positions_N], self.times_E[-1] + 1)
        stops_B = np.searchsorted(self.times_E, moments_B)
        begins_B = np.searchsorted(self.times_E, moments_B - self.seconds)
        scores_BI, counts_I = np.empty((len(targets), self.data.items)), np.zeros(self.data.items)
        begin = stop = 0
        for row in np.argsort(moments_B, kind="stable"):
            counts_I += np.bincount(self.items_E[stop : stops_B[row]], minlength=self.data.items)
            counts_I -= np.bincount(self.items_E[begin : begins_B[row]], minlength=self.data.items)
            begin, stop = begins_B[row], stops_B[row]
            scores_BI[row] = counts_I
        return torch.from_numpy(scores_BI)
