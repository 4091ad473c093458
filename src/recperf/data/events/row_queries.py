"""Rows of user, item and time, by the user's own ids, as queries of an event store.

A history ends before the time of its row. Where the row itself is an anchor of the store, it ends before that event, as
in an evaluation, also if other events have the same second. Without a time a row means now: after the last event.

Shapes: N rows, U users of the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files.values import LAST_SECOND, TIME_UNITS
from ..tables import BadRow, Ids, Unknown, as_text, is_text, one_array, pyarrow
from .kinds import ANCHORS, ORGANIC
from .store import EventStore, Queries, own_ids, own_name

UNITS = {**TIME_UNITS, "iso": ("ISO text", 1)}
AT_ONCE = 1 << 20
"""Events whose items are read at a time."""

Longs = NDArray[np.int64]


class RowQueries:
    """The own ids of a store's users and items, and its events by user and time."""

    def __init__(self, store: EventStore) -> None:
        self.store = store
        self.options = store.imported.options if store.imported else None
        self.users = Ids.of(self.spellings("user")[0], own_ids(store, "user"), np.arange(store.users))
        has_events_I = np.zeros(store.items, np.bool_)
        if "items" in store.originals:
            # Each listed item has events, unless it was taken over from earlier data.
            has_events_I[1:] = True
        for first in range(0, store.events, AT_ONCE):
            has_events_I[store.items_at(slice(first, min(first + AT_ONCE, store.events)))] = True
        known = np.flatnonzero(has_events_I)
        own = own_ids(store, "item")
        self.items = Ids.of(self.spellings("item")[0], [own[item] for item in known], known)

    def spellings(self, role: str) -> tuple[str, ...]:
        """Names of the column of a role: the one it was imported from, then the role itself."""
        return tuple(dict.fromkeys([own_name(self.store, role), role, f"{role}_id"]))

    @property
    def has_times(self) -> bool:
        """Whether events have times; those of an import without them only say which event was first."""
        return self.store.time_order == "time"

    @cached_property
    def now(self) -> int:
        """The time of the last event."""
        last_U = self.store.user_first_U1[1:] - 1
        return int(self.store.times_E[last_U].max(initial=0))

    def queries(self, rows: Mapping[str, Any]) -> tuple[Queries, dict[str, Unknown]]:
        """The queries of rows, and those with an unknown user or item. An unknown item has number 0."""
        users_N = self.users.indices(rows["user"])
        items_N, known_N = self.items.numbers(rows["item"])
        unknown = {"user": Unknown.of(users_N < 0, rows["user"]), "item": Unknown.of(~known_N, rows["item"])}
        times_N = self.seconds(rows["time"]) if "time" in rows else None
        return self.at(users_N, items_N, times_N), unknown

    def at(self, users_N: Longs, items_N: Longs, times_N: Longs | None) -> Queries:
        """Queries of users by their places, -1 for an unknown one, at a time; None or -1 means now."""
        first_N, stop_N = (
            np.where(users_N >= 0, self.store.user_first_U1[users_N + shift], 0).astype(np.int64) for shift in (0, 1)
        )
        times_N = np.full(len(users_N), -1) if times_N is None else times_N
        now_N = times_N < 0
        times_N = np.where(now_N, self.now, times_N)
        ends_N = np.where(now_N, stop_N, self.store.first_at(first_N, stop_N, times_N))
        ends_N = self._own_event(ends_N, stop_N, items_N, times_N)
        # An event says itself whether it is organic; other rows are as the user's event before them.
        organic_N = np.ones(len(ends_N), np.int64)
        # The event at the end of a history is the row itself where item and time agree.
        last = max(0, self.store.events - 1)
        inside_N = np.minimum(ends_N, last)
        same_N = (ends_N <= last) & (self.store.times_E[inside_N] == times_N)
        # Beyond the user's own events lie those of the next.
        same_N &= (self.store.items_E[inside_N] == items_N) & (ends_N < self.store.user_first_U1[users_N + 1])
        asked_N = np.where(same_N, inside_N, ends_N - 1)
        some_N = (users_N >= 0) & (same_N | (ends_N > first_N))
        organic_N[some_N] = (self.store.kinds(asked_N[some_N]) & ORGANIC) > 0
        return Queries(users_N, ends_N, items_N, times_N, organic_N)

    def _own_event(self, ends_N: Longs, stop_N: Longs, items_N: Longs, times_N: Longs) -> Longs:
        """The position of the first anchor of the same user, item and second, where there is one."""
        ends_N, here_N = ends_N.copy(), ends_N.copy()
        open_N = np.flatnonzero(here_N < stop_N)
        while open_N.size:
            at = here_N[open_N]
            open_N, at = (part[self.store.times_E[at] == times_N[open_N]] for part in (open_N, at))
            same = (self.store.items_E[at] == items_N[open_N]) & ((self.store.kinds(at) & ANCHORS) > 0)
            ends_N[open_N[same]] = at[same]
            here_N[open_N] += 1
            open_N = open_N[~same & (here_N[open_N] < stop_N[open_N])]
        return ends_N

    @property
    def _unit(self) -> str:
        # An import without times leaves the unit open: its times are numbers of rows.
        return self.options.time_unit if self.options and self.options.time_unit in UNITS else "s"

    def seconds(self, column: Any) -> Longs:
        """Times as whole seconds of the store, in the unit they were imported with; -1 where missing."""
        arrow, column = pyarrow(), one_array(column)
        wrong = (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OverflowError)
        try:
            return _seconds(column, self._unit)
        except wrong:
            for row in range(len(column)):
                try:
                    _seconds(column.slice(row, 1), self._unit)
                except wrong:
                    what = f"time {column[row].as_py()!r} is not a time in {UNITS[self._unit][0]}"
                    raise BadRow(row, what, "write times as the imported file has them") from None
            raise

    def own_times(self, seconds_N: Longs) -> Any:
        """Times of the store as the imported file had them."""
        arrow = pyarrow()
        if self._unit == "iso":
            return arrow.array(seconds_N).cast(arrow.timestamp("s"))
        return arrow.array(seconds_N * UNITS[self._unit][1])


def _seconds(column: Any, unit: str) -> Longs:
    arrow, compute = pyarrow(), pyarrow(".compute")
    types = arrow.types
    if is_text(column):
        column = as_text(column)
        column = _from_iso(column) if unit == "iso" else column.cast(arrow.float64())
    if types.is_timestamp(column.type) or types.is_date(column.type):
        zone = column.type.tz if types.is_timestamp(column.type) else None
        column, unit = column.cast(arrow.timestamp("us", zone), safe=False).cast(arrow.int64()), "us"
    if types.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), arrow.scalar(None, column.type), column)
        column = compute.floor(compute.divide(column, float(UNITS[unit][1]))).cast(arrow.int64())
    else:
        # There are no events before 1970: rounding towards zero is rounding down.
        column = compute.divide(column.cast(arrow.int64()), UNITS[unit][1])
    seconds = np.asarray(compute.fill_null(column, -1))
    if len(seconds) and seconds.max() > LAST_SECOND:
        raise OverflowError
    return seconds


def _from_iso(texts: Any) -> Any:
    """ISO texts as timestamps, with a zone in every row or in none."""
    arrow = pyarrow()
    try:
        return texts.cast(arrow.timestamp("us"))
    except arrow.ArrowInvalid:
        return texts.cast(arrow.timestamp("us", "UTC"))
