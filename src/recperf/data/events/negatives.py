"""Draws negatives for a log in which every row is positive: items that the user has not had by then.

An item that the user has later may be drawn: if it never were, a negative would say that no later event is of it.
Negatives are events with the mark `DRAWN`: anchors with label 0 that no history contains. They come right before their
positive event and have its time, so that both see the same history. They are a pure function of the seed and of the
number of events before: parts give what the whole gives.

A part may end in the middle of a user, however many events they have. What is kept of a user is one byte for every
item of the catalogue.

Shapes: M rows of a part in the order of users and times, among them N events and F first times, K negatives of each
event, I items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ops.hashing import xxh64
from ...stop import poll
from .kinds import DRAWN
from .manifest import DrawnNegatives
from .options import ImportOptions

Events = dict[str, NDArray[Any]]
Longs = NDArray[np.int64]

_ROUNDS = 16
"""Draws of one negative before the items that its user does not have are listed."""
_AT_ONCE = 1 << 18
"""Negatives that are drawn at once."""

_EVERY_ITEM = "SELECT user_id, item_id, min(seconds) AS seconds FROM events GROUP BY user_id, item_id"
FIRST_TIMES = f"SELECT user_id, item_id, seconds, NULL AS positive, -1 AS row FROM ({_EVERY_ITEM})"
"""SQL for a row for each item of a user, which comes before all events of its second: `positive` is NULL."""


class Negatives:
    def __init__(self, options: ImportOptions, items: int, counts_I: Longs | None) -> None:
        """Items are numbered from 1 to `items`. `counts_I` are the numbers of their events, if negatives are drawn by
        popularity."""
        self.facts = DrawnNegatives(
            per_event=options.drawn, by=options.negatives_by, seed=options.seed, drawn=0, left_out=0
        )
        self.items, self.events = items, 0
        self._ends_I = None if counts_I is None else np.cumsum(counts_I)
        self._user = -1
        self._had_I = np.zeros(items + 1, np.bool_)
        """Whether the last user of the part before had an item in it, or earlier; of item 0 nothing is kept."""

    def add(self, rows: Events, first_M: NDArray[np.bool_]) -> Iterator[Events]:
        """The events of a part, each after its negatives, some at a time. `first_M` marks the rows that say since when
        a user has an item."""
        users_M, items_M = (rows[name].astype(np.int64) for name in ("uids", "items"))
        had = _Had(self, users_M[first_M], items_M[first_M])
        position_N, before_M = np.flatnonzero(~first_M), np.cumsum(first_M, dtype=np.int64)
        step = max(1, _AT_ONCE // self.facts.per_event)
        for begin in range(0, len(position_N), step):
            poll()
            part_N = position_N[begin : begin + step]
            events = {name: column[part_N] for name, column in rows.items()}
            yield self._with_negatives(events, *self._draw(users_M[part_N], before_M[part_N], had))
        if users_M[-1] != self._user:
            self._user = int(users_M[-1])
            self._had_I[:] = False
        self._had_I[items_M[first_M & (users_M == self._user)]] = True

    def of_last_user(self, users_N: Longs) -> NDArray[np.bool_]:
        return np.equal(users_N, self._user)

    def had_earlier(self, items_N: Longs) -> NDArray[np.bool_]:
        """Whether the last user of the part before had these items by its end."""
        return self._had_I[items_N]

    def never_had(self, user: int) -> NDArray[np.uint32]:
        """The items that a user did not have before this part, ascending."""
        if user != self._user:
            return np.arange(1, self.items + 1, dtype=np.uint32)
        return (np.flatnonzero(~self._had_I[1:]) + 1).astype(np.uint32)

    def _with_negatives(self, events: Events, items_NK: Longs, drawn_NK: NDArray[np.bool_]) -> Events:
        self.facts.drawn += int(drawn_NK.sum())
        self.facts.left_out += int((~drawn_NK).sum())
        stored = np.pad(drawn_NK, ((0, 0), (0, 1)), constant_values=True)
        wide = {name: np.repeat(column[:, None], self.facts.per_event + 1, axis=1) for name, column in events.items()}
        wide["items"][:, :-1] = items_NK
        wide["kinds"][:, :-1] = DRAWN
        return {name: column[stored] for name, column in wide.items()}

    def _draw(self, users_N: Longs, before_N: Longs, had: _Had) -> tuple[Longs, NDArray[np.bool_]]:
        """Items that the user of each event does not have up to its time, and whether there is one. Users who have
        nearly every item get the few others equally often. `before_N` are the first times in the part before each."""
        items_NK = np.zeros((len(users_N), self.facts.per_event), np.int64)
        drawn_NK = np.ones(items_NK.shape, np.bool_)
        slot = np.arange(items_NK.size)
        row, column = np.divmod(slot, self.facts.per_event)
        for attempt in range(_ROUNDS):
            total = self.items if self._ends_I is None else self._ends_I[-1]
            ticket = self._hashes(row, column, attempt, int(total))
            items = (ticket if self._ends_I is None else np.searchsorted(self._ends_I, ticket, side="right")) + 1
            items_NK.reshape(-1)[slot] = items
            taken = had.has(users_N[row], items, before_N[row])
            slot, row, column = slot[taken], row[taken], column[taken]
            if not len(slot):
                break
        # Events of a user between which no new item came have the same others.
        new = np.diff(users_N[row]) | np.diff(before_N[row])
        for mine in np.split(np.arange(len(row)), np.flatnonzero(new) + 1):
            if not len(mine):
                continue
            poll()
            event = row[mine[0]]
            others = had.others(int(users_N[event]), int(before_N[event]))
            if len(others):
                ticket = self._hashes(row[mine], column[mine], _ROUNDS, len(others))
                items_NK.reshape(-1)[slot[mine]] = others[ticket]
            else:
                drawn_NK.reshape(-1)[slot[mine]] = False
        self.events += len(users_N)
        return items_NK, drawn_NK

    def _hashes(self, row: Longs, column: Longs, attempt: int, below: int) -> Longs:
        hashes = xxh64([row + self.events, column, np.full(len(row), attempt)], self.facts.seed)
        return (hashes % np.uint64(below)).astype(np.int64)


class _Had:
    """The items that users have in one part, since when, and before it."""

    def __init__(self, negatives: Negatives, users_F: Longs, items_F: Longs) -> None:
        self._before, self._users_F, self._items_F = negatives, users_F, items_F
        keys_F = users_F * (negatives.items + 1) + items_F
        self._since_F = np.argsort(keys_F)
        self._keys_F = keys_F[self._since_F]
        self._user, self._counted = -1, 0
        self._others = np.zeros(0, np.uint32)

    def has(self, users_N: Longs, items_N: Longs, before_N: Longs) -> NDArray[np.bool_]:
        """Whether these users have these items after the first `before_N` of the chunk's first times."""
        had = self._before.of_last_user(users_N) & self._before.had_earlier(items_N)
        if len(self._keys_F):
            keys_N = users_N * (self._before.items + 1) + items_N
            position_N = np.minimum(np.searchsorted(self._keys_F, keys_N), len(self._keys_F) - 1)
            had |= (self._keys_F[position_N] == keys_N) & (self._since_F[position_N] < before_N)
        return had

    def others(self, user: int, before: int) -> NDArray[np.uint32]:
        """The items that a user does not have after the first `before` times, ascending; `before` only grows."""
        if user != self._user:
            self._user, self._others = user, self._before.never_had(user)
            self._counted = int(np.searchsorted(self._users_F, user))
        if before > self._counted:
            new = np.searchsorted(self._others, self._items_F[self._counted : before].astype(np.uint32))
            self._others, self._counted = np.delete(self._others, new), before
        return self._others
