"""Running rates: counts and shares of listens of an anchor's user and item, as known just before the anchor.

Shapes: E events, N listens, B anchors, G groups, F features.

Everything is causal. Of a user only events before the anchor count, of an item only events of an earlier second. The
listens of a group (a user, an item, a user with an item...) lie side by side in the order of time, with running sums,
so that a binary search finds any moment, also that of a candidate that is no event. Negatives that an import drew count
as listens that were not positive, but not in groups of a user with an item or artist: no user met an
item that was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from . import neighbours
from .neighbours import Neighbours
from .schema import ANCHORS, DRAWN, LISTEN_PLUS, RATES
from .store import EventStore, Queries

PRIOR = 4.0
"""Listens at the overall share that every share is smoothed with."""
RECENT = 10
"""Listens of a user or item that count as recent."""
BINS = 1 << 12
"""Parts of the time span in which the overall share is looked up."""
BYTES_AN_EVENT = 160
"""Memory while the running sums are built."""
MOST_EVENTS = 1 << 32
MEANS = ("overall", "user", "item")
"""Columns whose sum is the log odds that user and item alone give."""
_PART = 1 << 18
CLOCK = MOST_EVENTS - 1
"""The bits of a code that hold the clock."""

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Groups:
    """Listens sorted by group and clock, with running sums of those that are positive."""

    keys_G: Longs
    codes_N: Longs
    """The group in the upper bits, the clock in the lower 32."""
    positives_N1: NDArray[np.uint32]

    @staticmethod
    def of(keys_N: Longs, clock_N: Longs, positive_N: NDArray[np.bool_]) -> Groups:
        keys_G, group_N = np.unique(keys_N, return_inverse=True)
        codes_N = (group_N.astype(np.int64) << 32) | clock_N
        order_N = np.argsort(codes_N, kind="stable")
        sums = np.concatenate([[0], np.cumsum(positive_N[order_N], dtype=np.uint32)]).astype(np.uint32)
        return Groups(keys_G, codes_N[order_N], sums)

    def before(self, keys_B: Longs, clock_B: Longs) -> tuple[Longs, Longs]:
        """Where the listens of a group begin, and where those before the clock end; equal where there are none."""
        group_B = np.searchsorted(self.keys_G, keys_B)
        known_B = self.keys_G[np.minimum(group_B, len(self.keys_G) - 1)] == keys_B
        code_B = group_B.astype(np.int64) << 32
        first_B, stop_B = np.searchsorted(self.codes_N, code_B), np.searchsorted(self.codes_N, code_B | clock_B)
        return np.where(known_B, first_B, 0), np.where(known_B, stop_B, 0)

    def positives(self, first_B: Longs, stop_B: Longs) -> Floats:
        return self.positives_N1[stop_B].astype(np.float64) - self.positives_N1[first_B]


class RunningRates:
    """Counts and shares as of a moment, for the model and for baselines; `RATES` names the columns."""

    def __init__(self, store: EventStore, cut: int) -> None:
        """Similarities of items are learned from events before `cut`, counts and shares from all before a query."""
        if store.events >= MOST_EVENTS:
            raise DataError(
                f"running rates are kept for fewer than {MOST_EVENTS:,} events",
                where={"store": store.folder},
                fix="--model.rates-hidden 0 --data.baselines bias",
            )
        self.store = store
        self.by_second = store.stored_per_event > 1
        """Whether a user's events of the same second do not count: next to an event lie negatives drawn for it."""
        kinds_E = store.kinds(slice(0, store.events))
        listens_N = np.flatnonzero(kinds_E & np.uint8(ANCHORS))
        positive_N = (kinds_E[listens_N] & np.uint8(LISTEN_PLUS)) > 0
        times_N = store.times_E[listens_N].astype(np.int64)
        own_N = times_N if self.by_second else listens_N
        users_N, items_N = store.users_of(listens_N), store.items_at(listens_N)
        self.user = Groups.of(users_N, own_N, positive_N)
        self.item = Groups.of(items_N, times_N, positive_N)
        real_N = (kinds_E[listens_N] & np.uint8(DRAWN)) == 0
        self.user_item = Groups.of(_pair(users_N, items_N)[real_N], own_N[real_N], positive_N[real_N])
        self.artist = self.user_artist = None
        if store.catalogue_I2[:, 0].any():
            artists_N = self._artists(items_N)
            self.artist = Groups.of(artists_N, times_N, positive_N)
            self.user_artist = Groups.of(_pair(users_N, artists_N)[real_N], own_N[real_N], positive_N[real_N])
        self.first_time, last = (int(times_N.min()), int(times_N.max())) if len(times_N) else (0, 0)
        self.period = max(1, (last - self.first_time) // 64)
        """Seconds that count as recent in the popularity of an item."""
        self._bin = max(1, -(-(last - self.first_time + 1) // BINS))
        bins_N = (times_N - self.first_time) // self._bin
        self._listens, self._positives = (
            np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=BINS))]) for bins in (bins_N, bins_N[positive_N])
        )
        self.neighbours: Neighbours | None = None
        if store.events <= neighbours.MOST_EVENTS:
            self.neighbours = Neighbours(store, self._expected(listens_N, users_N, items_N, times_N), cut)

    def _expected(self, listens_N: Longs, users_N: Longs, items_N: Longs, times_N: Longs) -> NDArray[np.float32]:
        """The probability that user and item alone give each event; 0 for what is no listen."""
        expected_E = np.zeros(self.store.events, np.float32)
        for start in range(0, len(listens_N), _PART):
            part = slice(start, start + _PART)
            queries = Queries(users_N[part], listens_N[part], items_N[part], times_N[part], np.zeros(0, np.int64))
            columns = self._columns(queries)
            expected_E[listens_N[part]] = 1 / (1 + np.exp(-sum(columns[name] for name in MEANS)))
        return expected_E

    @staticmethod
    def grouped(keys_N: Longs, times_N: Longs, positive_N: NDArray[np.bool_]) -> Groups:
        """Listens by any other key, for `share_and_count`."""
        return Groups.of(keys_N, times_N, positive_N)

    def share_and_count(self, groups: Groups, keys_B: Longs, times_B: Longs) -> list[Floats]:
        """The log odds of a group's share of positive listens before a time, and the logarithm of their number."""
        first_B, stop_B = groups.before(keys_B, times_B)
        return [_share(groups, first_B, stop_B, self.overall(times_B)), _logarithm(stop_B - first_B)]

    def _artists(self, items_B: Longs) -> Longs:
        return np.asarray(self.store.catalogue_I2[items_B, 0], np.int64)

    def overall(self, times_B: Longs) -> Floats:
        """The share of positive listens before the part of the time span that each time lies in."""
        part_B = np.clip((times_B - self.first_time) // self._bin, 0, BINS)
        return np.asarray((self._positives[part_B] + 1.0) / (self._listens[part_B] + 2.0))

    def of(self, queries: Queries) -> NDArray[np.float32]:
        columns, none_B = self._columns(queries), np.zeros(len(queries))
        if self.neighbours is not None:
            columns |= zip(RATES[-neighbours.COLUMNS :], self.neighbours.of(queries).T)
        return np.stack([columns.get(name, none_B) for name in RATES], 1).astype(np.float32)

    def _columns(self, queries: Queries) -> dict[str, Floats]:
        users_B, items_B, times_B = queries.users_B, queries.items_B, queries.times_B
        own_B = times_B if self.by_second else queries.ends_B
        artists_B, overall_B = self._artists(items_B), self.overall(times_B)
        columns = {"overall": _log_odds(overall_B)}
        for name, groups, keys_B, clock_B in (
            ("user", self.user, users_B, own_B),
            ("item", self.item, items_B, times_B),
            ("user_item", self.user_item, _pair(users_B, items_B), own_B),
            ("artist", self.artist, artists_B, times_B),
            ("user_artist", self.user_artist, _pair(users_B, artists_B), own_B),
        ):
            if groups is None:
                continue
            first_B, stop_B = groups.before(keys_B, clock_B)
            columns[name] = _share(groups, first_B, stop_B, overall_B)
            columns[f"{name}_listens"] = _logarithm(stop_B - first_B)
            columns[f"{name}_recent"] = _share(groups, np.maximum(first_B, stop_B - RECENT), stop_B, overall_B)
            if name == "user":
                columns["since_last_event"] = _logarithm(times_B - self._last_times(first_B, stop_B, times_B)) / 2
            if name == "item":
                earlier_B = groups.before(keys_B, np.maximum(times_B - self.period, 0))[1]
                columns["item_trend"] = _logarithm(stop_B - earlier_B)
        return columns

    def _last_times(self, first_B: Longs, stop_B: Longs, times_B: Longs) -> Longs:
        """The times of the users' last listens; the time of the query where there is none."""
        clock_B = self.user.codes_N[np.maximum(stop_B - 1, 0)] & CLOCK
        last_B = clock_B if self.by_second else self.store.times_E[clock_B].astype(np.int64)
        return np.minimum(np.where(stop_B > first_B, last_B, times_B), times_B)


def _pair(users_N: Longs, others_N: Longs) -> Longs:
    return users_N << 32 | others_N


def _share(groups: Groups, first_B: Longs, stop_B: Longs, overall_B: Floats) -> Floats:
    """How far the log odds of the smoothed share are above those of the overall share."""
    share_B = (groups.positives(first_B, stop_B) + PRIOR * overall_B) / (stop_B - first_B + PRIOR)
    return _log_odds(share_B) - _log_odds(overall_B)


def _log_odds(share_B: Floats) -> Floats:
    share_B = np.clip(share_B, 1e-4, 1 - 1e-4)
    return np.asarray(np.log(share_B / (1 - share_B)))


def _logarithm(count_B: Longs) -> Floats:
    """The logarithm of one more than a count, scaled to a few units at most."""
    return np.asarray(np.log1p(count_B.astype(np.float64)) / 4)
