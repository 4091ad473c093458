"""Anchors to batches: the history of a user and the item that followed it.

Shapes: B samples, T events of history in the batch, F features, X context features, C crosses, V ids in the batch.

A history holds only events of the same user before the anchor. Of the anchor itself a batch holds the item with its
artist and album, the label, and the hour and origin for the cross features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import DataError, MachineError
from ...ops.history import Crosses, Events, HistoryArrays, Name, Picked, Rule, choose
from ...ops.history.reference import LARGE_ID
from ..batch import HistoryBatch, JaggedFeatures
from ..events.kinds import ACTION_BITS, LIKE, MOST_ID, NEGATIVE, POSITIVE
from ..events.store import EventStore
from .config import HistoryConfig
from .features import CANDIDATE, CONTEXT, CROSSES, HISTORY
from .queries import Queries, organic
from .rates import RunningRates

KEYS = (*CONTEXT, *HISTORY, *CANDIDATE)
HOUR_S, DAY_HOURS = 3600, 24
TARGET = ("uid", "item", "artist", "album", "hour", "organic")
_CROSSES = Crosses.of([(tuple(map(TARGET.index, parts)), rows) for parts, rows in CROSSES.values()])

Words = NDArray[np.int64]


def rule_of(config: HistoryConfig) -> Rule:
    """The strategy as parameters of the `history` op."""
    if config.strategy == "interleaved":
        return Rule(actions=(POSITIVE, LIKE, NEGATIVE), cap=config.events_per_action, most=config.longest)
    return Rule(actions=(ACTION_BITS,), cap=config.length, most=config.longest)


class Histories:
    """Makes batches of a store's anchors; thread-safe, each call uses one thread.

    `why` names the implementation and the reason for it. With `pin` the batches are in page-locked memory, with `rates`
    they have running rates.
    """

    def __init__(
        self,
        store: EventStore,
        config: HistoryConfig,
        *,
        impl: Name = "auto",
        pin: bool = False,
        rates: RunningRates | None = None,
    ) -> None:
        if pin and not torch.cuda.is_available():
            raise MachineError("pinned memory needs a GPU, and torch finds none", fix="use pin=False")
        _check(store)
        self.store, self.config, self.pin, self.rates = store, config, pin, rates
        self.rule, kinds = rule_of(config), [column.array for column in store.kind_columns]
        self._events = Events(
            items_E=store.items_E.array,
            times_E=store.times_E.array,
            catalogue_I2=store.groups_IG,
            kinds_E=kinds[0] if len(kinds) == 1 else None,
            flags=None if len(kinds) == 1 else (kinds[0], kinds[1], kinds[2]),
        )
        self._body, self.why = choose(impl)

    def batch(self, positions_B: Words) -> HistoryBatch:
        """The samples of these anchors, in their order. An anchor is given as the position of its event."""
        positions_B = self._checked(positions_B)
        kinds_B = self.store.kinds(positions_B)
        return self.queried(self.events(positions_B, kinds_B), (kinds_B & POSITIVE) > 0)

    def lengths(self, positions_B: Words) -> Words:
        """The number of events in each history of a batch of these anchors. Only kinds of events are read."""
        positions_B = self._checked(positions_B)
        begin_B = self._first(self.store.users_of(positions_B), positions_B)
        self._require_kinds(begin_B, positions_B)
        lengths_B: Words = self._body.lengths(self._events, begin_B, positions_B, self.rule)
        return lengths_B

    def events(self, positions_B: Words, kinds_B: NDArray[np.uint8]) -> Queries:
        store = self.store
        times_B, items_B = store.times_E[positions_B].astype(np.int64), store.items_at(positions_B)
        return Queries(store.users_of(positions_B), positions_B, items_B, times_B, organic(store, kinds_B))

    def queried(self, queries: Queries, labels_B: NDArray[np.bool_] | None = None) -> HistoryBatch:
        """The samples of queries, in their order; without labels these are 0."""
        begin_B = self._first(queries.users_B, queries.ends_B)
        picked = self._picked(begin_B, queries.ends_B)
        batch, total = len(queries), len(picked.places_T)
        lengths_FB = np.ones((len(KEYS), batch), np.int64)
        lengths_FB[len(CONTEXT) : -len(CANDIDATE)] = np.diff(picked.offsets_B1)

        values_V = self._empty(len(CONTEXT) * batch + len(HISTORY) * total + len(CANDIDATE) * batch, torch.int32)
        times_T = self._empty(total, torch.int64)
        context, history, candidate = np.split(
            values_V.numpy(), [len(CONTEXT) * batch, len(values_V) - len(CANDIDATE) * batch]
        )
        items_T, artists_T, albums_T = history.reshape(len(HISTORY), total)
        room = HistoryArrays(items_T=items_T, artists_T=artists_T, albums_T=albums_T, times_T=times_T.numpy())
        try:
            self._body.fill(self._events, begin_B, picked, room)
        except DataError as error:
            raise _damaged(self.store, error.what) from None

        # The time of the last event of each history, or of the target if the history is empty or the config asks.
        query_times_B, some_B = queries.times_B.copy(), np.diff(picked.offsets_B1) > 0
        if self.config.query_time == "last-event":
            query_times_B[some_B] = room.times_T[picked.offsets_B1[1:][some_B] - 1]
        target_KB = self._target(queries)
        uid, item, artist, album = target_KB[:4]
        context_XB = context.reshape(len(CONTEXT), batch)
        context_XB[0] = uid
        self._body.crosses(target_KB, _CROSSES, context_XB[1:])
        candidate.reshape(len(CANDIDATE), batch)[:] = item, artist, album
        return HistoryBatch(
            JaggedFeatures(KEYS, values_V, self._tensor(np.concatenate([[0], np.cumsum(lengths_FB)]))),
            self._tensor(picked.offsets_B1),
            self._tensor(picked.actions_T),
            times_T,
            self._tensor(query_times_B),
            self._tensor((np.zeros(batch) if labels_B is None else labels_B).astype(np.float32)),
            None if self.rates is None else self._tensor(self.rates.of(queries)),
        )

    def _picked(self, begin_B: Words, positions_B: Words) -> Picked:
        """Pick the events of the histories; everything that picking and filling read is verified first."""
        store = self.store
        self._require_kinds(begin_B, positions_B)
        picked: Picked = self._body.pick(self._events, begin_B, positions_B, self.rule)
        some_B = picked.offsets_B1[1:] > picked.offsets_B1[:-1]
        oldest_B = begin_B[some_B] + picked.places_T[picked.offsets_B1[:-1][some_B]]
        for column in (store.items_E, store.times_E):
            column.require(oldest_B, positions_B[some_B])
        return picked

    def _require_kinds(self, begin_B: Words, positions_B: Words) -> None:
        for column in self.store.kind_columns[:3]:
            column.require(begin_B, positions_B)

    def _checked(self, positions_B: Words) -> Words:
        outside = (positions_B < 0) | (positions_B >= self.store.events)
        if outside.any():
            raise DataError(
                f"anchor {int(positions_B[outside][0])} is not the position of an event; the store has "
                f"{self.store.events:,} events",
                where={"store": self.store.folder},
                fix="anchors must come from this store",
            )
        return np.ascontiguousarray(positions_B, np.int64)

    def _first(self, users_B: Words, ends_B: Words) -> Words:
        """The first event to scan for each history."""
        first_B = np.where(users_B >= 0, self.store.user_first_U1[users_B], ends_B).astype(np.int64)
        if ((first_B < 0) | (first_B > ends_B)).any():
            raise _damaged(self.store, "its users are not in ascending order")
        return np.maximum(first_B, ends_B - self.config.scan * self.store.stored_per_event)

    def _target(self, queries: Queries) -> Words:
        """The inputs of the cross features, in the order of `TARGET`. An unknown user has id 0."""
        users_B, item_B = queries.users_B, queries.items_B
        artist_B, album_B = self.store.groups_IG[item_B].T.astype(np.int64)
        if max(artist_B.max(initial=0), album_B.max(initial=0)) > MOST_ID:
            raise _damaged(self.store, LARGE_ID)
        uid_B = np.where(users_B >= 0, self.store.user_ids_U[users_B], 0)
        hour_B = queries.times_B // HOUR_S % DAY_HOURS
        return np.array([uid_B, item_B, artist_B, album_B, hour_B, queries.organic_B], np.int64)

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=self.pin)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        """An array of the batch as a tensor; a copy of it if the batches are pinned."""
        if not self.pin:
            return torch.from_numpy(np.ascontiguousarray(array))
        tensor = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=self.pin)
        tensor.numpy()[:] = array
        return tensor


def _check(store: EventStore) -> None:
    """Check the lengths that gathering relies on: otherwise it could read past the end of a column."""
    if any(len(column) != store.events for column in store.columns):
        raise _damaged(store, "its columns differ in length")
    first = store.user_first_U1
    if len(first) != store.users + 1 or first[0] != 0 or first[-1] != store.events:
        raise _damaged(store, "its users do not cover its events")
    if max(store.items - 1, int(store.user_ids_U.max(initial=0))) > MOST_ID:
        raise _damaged(store, f"it has a user or item id above {MOST_ID:,}")


def _damaged(store: EventStore, how: str) -> DataError:
    return DataError(
        f"this store cannot be read: {how}", where={"store": store.folder}, fix="prepare it again, or open another"
    )
