"""Rules that count the training events of a next-item log: popularity, recent popularity, what follows the last items,
and items of the same users (item-kNN).

Shapes: N targets, B targets of a batch, I items (column k is item k + 1), P pairs of a target and an item of its
history, R rows of a matrix, W entries of a sparse matrix, E events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.next_item import NextItemData, Targets
from ..ops.followers import Followed, PairCounts
from ..ops.followers import choose as choose_followers
from ..ops.followers.reference import ranges
from ..stop import poll
from .next_item import (
    ENTRIES,
    TOGETHER,
    Floats,
    Hide,
    Longs,
    Scorer,
    blocks,
    histories,
    item_counts,
    ranks_of,
    seen_by_default,
    training_events,
)
from .ranking import RecentShares
from .sparse_ranks import added_up, rank_by_counts, ranked_sums

LAST, DECAYS = 10, (0.5, 0.7, 0.85)
"""Items of a history that baselines look at, and how much less each earlier one may weigh; counts of what follows an
item also look that far, with these weights."""
DAMPINGS = (0.0, 0.5, 1.0)
"""Powers of an item's events that counts of what follows it are divided by: 0 favours frequent items, 1 rare ones."""
NEIGHBOURS = 100
"""Similar items that each item has in item-kNN."""
MOST_PAIRS = 10_000_000
"""Pairs of items of one user that item-kNN counts; of longer histories the latest items count."""
PAIRS = 1 << 20
"""Pairs of items that are counted at a time."""
SHARED_OUT = 16
"""So many times as many are shared out to threads, each of which has a sum for every item."""
FEW, ROW = 8, 64
"""Targets with entries for at most one in so many items are ranked by these alone; what a target costs, in entries."""
KEPT_BYTES = 1 << 29
"""Memory for the counts of what follows an item. Items with the most events have theirs kept; those of the others are
counted from the events whenever a history has them."""
ENTRY_BYTES = 12
COMPARED = 1000
"""Validation targets on which the settings of a baseline are compared."""


def baselines(data: NextItemData) -> dict[str, Callable[[], Scorer]]:
    """Makes each baseline that the data allows, its settings chosen on validation targets. Without times there is no
    recent popularity."""
    makers: dict[str, Callable[[], Scorer]] = {"popularity": lambda: popularity(data)}
    if data.times_E is not None:
        makers["recent_popularity"] = lambda: best(data, RecentPopularity.options(data))
    makers["item_to_item"] = lambda: best(data, all_following(data))
    makers["item_knn"] = lambda: best(data, item_knn(neighbours(data)))
    return makers


@dataclass(frozen=True, eq=False)
class Popularity:
    """Training events of each item."""

    data: NextItemData
    counts_I: Longs

    def __call__(self, targets: Targets) -> Tensor:
        return torch.from_numpy(self.counts_I.astype(np.float64)).expand(len(targets), -1)

    def ranks(self, targets: Targets, hide: Hide) -> tuple[Longs, Longs]:
        sorted_I, ranks_N = np.sort(self.counts_I), np.zeros(len(targets), np.int64)
        for part, some in _parts(targets, np.arange(len(targets))):
            hidden, columns_B = hide(some), _columns(self.data, some)
            rows_H, columns_H = np.divmod(hidden.codes_H, self.data.items)
            own_B = self.counts_I[columns_B]
            above_H = self.counts_I[columns_H] >= own_B[rows_H]
            ranks_B = (
                len(sorted_I) - np.searchsorted(sorted_I, own_B) - np.bincount(rows_H[above_H], minlength=len(part))
            )
            own_codes_B = np.arange(len(part)) * self.data.items + columns_B
            ranks_N[part] = np.where(hidden.has(own_codes_B), self.data.items, ranks_B)
        return ranks_N, ranks_N[:0]


def popularity(data: NextItemData) -> Scorer:
    return Popularity(data, item_counts(data))


def item_knn(alike: ItemToItem) -> list[ItemToItem]:
    """With each of the weights that an earlier item of a history may have."""
    return [replace(alike, decay=decay) for decay in DECAYS]


def best(data: NextItemData, options: Iterable[Scorer]) -> Scorer:
    """The option with the highest mean reciprocal rank of validation targets."""
    targets = data.validation()
    step = max(1, -(-len(targets) // COMPARED))
    compared, seen = targets[::step], seen_by_default(data)
    return max(options, key=lambda option: float((1 / ranks_of(data, compared, option, seen=seen).double()).mean()))


@dataclass(frozen=True, eq=False)
class ItemRows:
    """Rows of a sparse matrix whose columns are items."""

    offsets_R1: Longs
    columns_W: NDArray[np.int32]
    weights_W: Floats
    totals_R: Floats
    """The numbers whose powers the rows are divided by."""

    def entries(self, rows_P: Longs, places_P: Longs, damping: float) -> tuple[Longs, NDArray[np.int32], Floats]:
        """All entries of some rows: the place given for the row, the column and the value."""
        part_W, entries_W = ranges(self.offsets_R1[rows_P], np.diff(self.offsets_R1)[rows_P])
        divisors_P = (self.totals_R**damping)[rows_P]
        return places_P[part_W], self.columns_W[entries_W], self.weights_W[entries_W] / divisors_P[part_W]


@dataclass(frozen=True, eq=False)
class ItemToItem:
    """Adds up rows of a matrix of items for the last items of a history, of which earlier ones weigh less."""

    data: NextItemData
    kept: ItemRows
    row_I: Longs
    """The row of each item in `kept`; -1: `followers` counts it when it is needed."""
    most_I: Longs
    """The most entries that the row of each item can have."""
    decay: float
    damping: float = 0.0
    followers: Followers | None = None

    def __call__(self, targets: Targets) -> Tensor:
        items, scores_BI = self.data.items, np.zeros(len(targets) * self.data.items)
        targets_P, events_P = histories(self.data, targets, LAST)
        columns_P = self.data.items_E[events_P] - 1
        weights_P = self.decay ** (targets.ends_N[targets_P] - 1 - events_P)
        most_B = np.bincount(targets_P, self.most_I[columns_P], len(targets)).astype(np.int64)
        # All entries of a target are added up at once, so that its scores do not depend on how targets are divided.
        for first, stop in blocks(most_B, ENTRIES):
            begin, end = np.searchsorted(targets_P, [first, stop])
            pairs_W, columns_W, counts_W = self.entries(columns_P[begin:end])
            places_W = (targets_P[begin:end] - first)[pairs_W] * items + columns_W
            added = np.bincount(places_W, counts_W * weights_P[begin:end][pairs_W])
            scores_BI[first * items : first * items + len(added)] = added
        return torch.from_numpy(scores_BI.reshape(len(targets), items))

    def ranks(self, targets: Targets, hide: Hide) -> tuple[Longs, Longs]:
        """Of targets whose sums have entries for a small part of the items; the others are left."""
        targets_P, events_P = histories(self.data, targets, LAST)
        columns_P = self.data.items_E[events_P] - 1
        weights_P = self.decay ** (targets.ends_N[targets_P] - 1 - events_P)
        most_N = np.bincount(targets_P, self.most_I[columns_P], len(targets)).astype(np.int64)
        few_N, ranks_N = most_N * FEW < self.data.items, np.zeros(len(targets), np.int64)
        few, part_P = np.flatnonzero(few_N), few_N[targets_P]
        # From here on a target has the number that it has among those with few entries.
        targets_P, columns_P, weights_P = (
            (np.cumsum(few_N) - 1)[targets_P[part_P]],
            columns_P[part_P],
            weights_P[part_P],
        )
        for first, stop in blocks(most_N[few] + ROW, ENTRIES):
            poll()
            begin, end = np.searchsorted(targets_P, [first, stop])
            some = targets[few[first:stop]]
            pairs_W, columns_W, counts_W = self.entries(columns_P[begin:end])
            codes_W = (targets_P[begin:end] - first)[pairs_W] * self.data.items + columns_W
            sums = added_up(codes_W, counts_W * weights_P[begin:end][pairs_W])
            ranks_N[few[first:stop]] = ranked_sums(*sums, _columns(self.data, some), hide(some))
        return ranks_N, np.flatnonzero(~few_N)

    def entries(self, columns_P: NDArray[np.int32]) -> tuple[Longs, NDArray[np.int32], Floats]:
        """All entries of the rows of some items: the place of the item, the column and the value."""
        rows_P = self.row_I[columns_P]
        kept, others = np.flatnonzero(rows_P >= 0), np.flatnonzero(rows_P < 0)
        entries = self.kept.entries(rows_P[kept], kept, self.damping)
        if self.followers is None or not len(others):
            return entries
        items_R, rows = np.unique(columns_P[others], return_inverse=True)
        counted = self.followers.rows(items_R, self.decay).entries(rows, others, self.damping)
        pairs_W = np.concatenate([entries[0], counted[0]])
        columns_W, counts_W = np.concatenate([entries[1], counted[1]]), np.concatenate([entries[2], counted[2]])
        order_W = np.argsort(pairs_W, kind="stable")
        return pairs_W[order_W], columns_W[order_W], counts_W[order_W]


@dataclass(frozen=True, eq=False)
class Followers:
    """Where the training events of each item are, so that what follows it can be counted: 5 bytes an event."""

    data: NextItemData
    events: Followed
    """With training events of the same user after each training event, at most LAST."""
    offsets_I1: Longs
    """Where the events of each item begin."""

    @staticmethod
    def of(data: NextItemData) -> Followers:
        train = data.train()
        after_E = training_events(data).view(np.uint8) * np.uint8(LAST)
        for after in range(LAST):
            long_S = train.ends_S - train.begins_S > after
            after_E[train.ends_S[long_S] - 1 - after] = after
        events_P = np.flatnonzero(after_E).astype(np.int32)
        items_P = data.items_E[events_P]
        offsets_I1 = np.cumsum(np.bincount(items_P, minlength=data.items + 1))
        events_P = events_P[np.argsort(items_P, kind="stable")]
        return Followers(data, Followed(data.items, data.items_E, after_E, events_P), offsets_I1)

    @property
    def most_I(self) -> Longs:
        """The most entries that the row of each item can have."""
        most_I: Longs = np.minimum(LAST * np.diff(self.offsets_I1), self.data.items)
        return most_I

    def rows(self, items_R: NDArray[Any], decay: float) -> ItemRows:
        """How often each item came soon after some items, which ascend."""
        room, filled, most_R = self.most_I[items_R], 0, LAST * np.diff(self.offsets_I1)[items_R]
        columns_W, weights_W = np.empty(room.sum(), np.int32), np.empty(room.sum())
        lengths_R, totals_R = np.zeros(len(items_R), np.int64), np.zeros(len(items_R))
        (body, _), weights_D = choose_followers(), np.array([decay**more for more in range(LAST)])
        for first, stop in blocks(most_R, SHARED_OUT * PAIRS):
            poll()
            begins_R, ends_R = self.offsets_I1[items_R[first:stop]], self.offsets_I1[items_R[first:stop] + 1]
            rows_W, columns, counts = body.count(self.events, begins_R, ends_R, weights_D, pairs=PAIRS)
            columns_W[filled : filled + len(columns)], weights_W[filled : filled + len(columns)] = columns, counts
            filled += len(columns)
            lengths_R[first:stop] = np.bincount(rows_W, minlength=stop - first)
            totals_R[first:stop] = np.bincount(rows_W, counts, stop - first)
        return ItemRows(np.append(0, np.cumsum(lengths_R)), columns_W[:filled], weights_W[:filled], totals_R)


def all_following(data: NextItemData) -> Iterator[ItemToItem]:
    """With each decay and damping."""
    followers = Followers.of(data)
    return (option for decay in DECAYS for option in following(data, decay, followers))


def following(data: NextItemData, decay: float, followers: Followers | None = None) -> list[ItemToItem]:
    """How often each item came soon after another, divided by each power of how often that was."""
    followers = followers or Followers.of(data)
    order_I = np.argsort(-followers.most_I, kind="stable")
    fits_I = np.cumsum(followers.most_I[order_I]) * ENTRY_BYTES <= KEPT_BYTES
    kept_R, row_I = np.sort(order_I[fits_I]), np.full(data.items, -1)
    row_I[kept_R] = np.arange(len(kept_R))
    kept = followers.rows(kept_R, decay)
    return [ItemToItem(data, kept, row_I, followers.most_I, decay, damping, followers) for damping in DAMPINGS]


def neighbours(data: NextItemData) -> ItemToItem:
    """The cosine of the sets of users of two items, of the most similar items of each."""
    train = data.train()
    last = int((train.ends_S - train.begins_S).max())
    while last > 1 and int((np.minimum(train.ends_S - train.begins_S, last) ** 2).sum()) > MOST_PAIRS:
        last -= max(1, last // 8)
    rows_P, events_P = histories(data, Targets(train.users_S, train.ends_S), last)
    pairs_P = np.unique(rows_P * data.items + data.items_E[events_P] - 1)
    del rows_P, events_P
    users_P, columns_P = np.divmod(pairs_P, data.items)
    events_I, lengths_U = np.bincount(columns_P, minlength=data.items), np.bincount(users_P)
    begins_U = np.cumsum(lengths_U) - lengths_U
    pairs_I = np.bincount(columns_P, lengths_U[users_P], data.items).astype(np.int64)
    users_P, begins_I1 = users_P[np.argsort(columns_P, kind="stable")], np.append(0, np.cumsum(events_I))
    parts = []
    for first, stop in blocks(pairs_I, PAIRS):
        poll()
        # Each item with each item of each of its users.
        users, rows = (
            users_P[begins_I1[first] : begins_I1[stop]],
            np.repeat(np.arange(first, stop), events_I[first:stop]),
        )
        one, other = ranges(begins_U[users], lengths_U[users])
        rows, columns = rows[one], columns_P[other]
        counts = PairCounts(stop - first, data.items, PAIRS)
        counts.add(rows[rows != columns] - first, columns[rows != columns], 1.0)
        rows_W, columns_W, counts_W = counts.result()
        rows_W += first
        cosine_W = counts_W / np.sqrt(events_I[rows_W] * events_I[columns_W])
        order_W = np.argsort(rows_W - cosine_W / 2, kind="stable")
        place_W = np.arange(len(order_W)) - np.searchsorted(rows_W, rows_W[order_W])
        kept_W = np.sort(order_W[place_W < NEIGHBOURS])
        parts.append((rows_W[kept_W], columns_W[kept_W].astype(np.int32), cosine_W[kept_W]))
    rows_W, columns, weights_W = (np.concatenate(part) for part in zip(*parts))
    offsets_I1 = np.searchsorted(rows_W, np.arange(data.items + 1))
    kept = ItemRows(offsets_I1, columns, weights_W, np.ones(data.items))
    return ItemToItem(data, kept, np.arange(data.items), np.diff(offsets_I1), DECAYS[0])


@dataclass(frozen=True, eq=False)
class RecentPopularity:
    """Training events of each item in a time before the target."""

    data: NextItemData
    shares: RecentShares
    seconds: int

    @staticmethod
    def options(data: NextItemData) -> list[RecentPopularity]:
        """With the time of all events, half of it, and so on."""
        assert data.times_E is not None
        events_N = np.flatnonzero(training_events(data)).astype(np.int32)
        # In order, so that no second copy is needed.
        events_N = events_N[np.argsort(data.times_E[events_N], kind="stable")]
        items_N = torch.from_numpy(data.items_E[events_N] - 1)
        shares = RecentShares(items_N, torch.from_numpy(data.times_E[events_N]), data.items)
        return [RecentPopularity(data, shares, seconds) for seconds in shares.halvings()]

    def __call__(self, targets: Targets) -> Tensor:
        return self.shares.counts(self._moments(targets), self.seconds)

    def ranks(self, targets: Targets, hide: Hide) -> tuple[Longs, Longs]:
        moments_N, ranks_N = self._moments(targets), np.zeros(len(targets), np.int64)
        windows = self.shares.windows(moments_N, self.seconds)
        for part, some in _parts(targets, moments_N.argsort(stable=True).numpy()):
            hidden, columns_B = hide(some), _columns(self.data, some)
            edges_B1 = np.searchsorted(hidden.codes_H, np.arange(len(part) + 1) * self.data.items)
            columns_H = hidden.codes_H % self.data.items
            for place, column in enumerate(columns_B.tolist()):
                row, counts_I = next(windows)
                assert row == part[place]
                own_H = columns_H[edges_B1[place] : edges_B1[place + 1]]
                ranks_N[row] = rank_by_counts(counts_I.numpy(), column, own_H)
        return ranks_N, ranks_N[:0]

    def _moments(self, targets: Targets) -> Tensor:
        """With a split by time targets may come long after the last training event."""
        assert self.data.times_E is not None
        return torch.from_numpy(self.data.times_E[targets.ends_N]).clamp_max(self.shares.times_N.max() + 1)


def _columns(data: NextItemData, targets: Targets) -> Longs:
    columns_N: Longs = data.items_E[targets.positions_N].astype(np.int64) - 1
    return columns_N


def _parts(targets: Targets, order_N: Longs) -> Iterator[tuple[Longs, Targets]]:
    """TOGETHER targets at a time, in this order."""
    for first in range(0, len(order_N), TOGETHER):
        poll()
        part = order_N[first : first + TOGETHER]
        yield part, targets[part]
