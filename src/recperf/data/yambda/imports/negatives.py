"""Draws negatives for logs in which every row is positive: items that the user has not had by then.

An item that the user has later may be drawn: if it never were, a negative would say that no later event is of it.

Shapes: N positive events of whole users in the order of time, K negatives of each, I items.

They are stored as events with the mark `DRAWN`: anchors with label 0 that no history contains. They come right before
their positive event and have its time, so that both see the same history.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....ops.xxh64 import xxh64
from ..schema import DRAWN, ORGANIC

_ROUNDS = 16
"""Draws of one negative before the items that its user does not have are listed."""

Events = dict[str, NDArray[Any]]
Longs = NDArray[np.int64]


@dataclass
class Negatives:
    """`draw` is a pure function of the seed and of the number of events before: parts give what the whole gives."""

    count: int
    counts_I: NDArray[np.int64]
    """Events of every item, by its id."""
    by_popularity: bool
    seed: int
    events: int = 0
    """Positive events so far."""
    drawn: int = 0
    left_out: int = 0
    _known: NDArray[np.int64] = field(init=False)
    _ends: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self._known = np.flatnonzero(self.counts_I)
        self._ends = np.cumsum(
            self.counts_I[self._known] if self.by_popularity else np.ones(len(self._known), np.int64)
        )

    def add(self, events: Events) -> Events:
        """Events of whole users with the negatives of every listen before it."""
        items_NK, drawn_NK = self.draw(*(events[name].astype(np.int64) for name in ("uids", "items", "times")))
        # Only listens have a label.
        drawn_NK &= ((events["kinds"] >> 4) == 0)[:, None]
        self.drawn += int(drawn_NK.sum())
        everything = np.ones((len(drawn_NK), 1), np.bool_)
        stored = np.concatenate([drawn_NK, everything], axis=1)
        wide = {name: np.repeat(column[:, None], self.count + 1, axis=1) for name, column in events.items()}
        wide["items"][:, :-1] = items_NK
        wide["kinds"][:, :-1] = DRAWN | ORGANIC
        return {name: column[stored] for name, column in wide.items()}

    def draw(self, users_N: Longs, items_N: Longs, times_N: Longs) -> tuple[Longs, NDArray[np.bool_]]:
        """Items that the user of each event does not have up to its time, and whether there is one. Users who have
        nearly every item get the few others equally often."""
        own, first = np.unique(users_N * len(self.counts_I) + items_N, return_index=True)
        since = times_N[first]
        items_NK = np.zeros((len(users_N), self.count), np.int64)
        place = np.arange(items_NK.size)
        row, column = np.divmod(place, max(1, self.count))
        for attempt in range(_ROUNDS):
            hashes = xxh64([row + self.events, column, np.full(len(row), attempt)], self.seed)
            ticket = (hashes % np.uint64(self._ends[-1])).astype(np.int64)
            items = self._known[np.searchsorted(self._ends, ticket, side="right")]
            items_NK.reshape(-1)[place] = items
            key = users_N[row] * len(self.counts_I) + items
            pair = np.minimum(np.searchsorted(own, key), len(own) - 1)
            taken = (own[pair] == key) & (since[pair] <= times_N[row])
            place, row, column = place[taken], row[taken], column[taken]
            if not len(place):
                break
        found_NK = np.ones(items_NK.shape, np.bool_)
        # Events of a user between which no new item came have the same others.
        last = np.append(np.flatnonzero(np.diff(users_N) | np.diff(times_N)), len(users_N) - 1)
        end_N = last[np.searchsorted(last, np.arange(len(users_N)))]
        items_so_far_N = np.cumsum(np.bincount(first, minlength=len(users_N)))[end_N]
        for mine in np.split(np.arange(len(row)), np.flatnonzero(np.diff(items_so_far_N[row])) + 1):
            if not len(mine):
                continue
            event = row[mine[0]]
            begin = np.searchsorted(users_N, users_N[event])
            others = np.setdiff1d(self._known, items_N[begin : end_N[event] + 1])
            if len(others):
                hashes = xxh64([row[mine] + self.events, column[mine], np.full(len(mine), _ROUNDS)], self.seed)
                items_NK.reshape(-1)[place[mine]] = others[(hashes % np.uint64(len(others))).astype(np.int64)]
            else:
                found_NK.reshape(-1)[place[mine]] = False
        self.events += len(users_N)
        self.left_out += int((~found_NK).sum())
        return items_NK, found_NK
