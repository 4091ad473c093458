"""Listening events as ratings, so that click models train on an event store: a listen is a click if it was played."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...errors import UsageError
from ..datasets import Dataset
from ..ratings import Ints, Ratings
from .imports.ids import own_ids
from .reference.cache import open_events
from .schema import ANCHORS, LISTEN_PLUS
from .store import EventStore

GROUPS = ("artist", "album")


@dataclass(frozen=True, kw_only=True, eq=False)
class EventRatings(Ratings):
    """The listens of an event store. `groups` has the artist and the album of every listen, as far as any is known."""

    groups: dict[str, Ints]
    rows: dict[str, int]

    def id_features(self) -> dict[str, tuple[Ints, int]]:
        ids = {"user": self.user, "item": self.item, **self.groups}
        return {name: (ids[name], rows) for name, rows in self.rows.items()}

    def for_pairs(self, user: Ints, item: Ints) -> EventRatings:
        groups = {}
        for name, ids in self.groups.items():
            by_item = np.zeros(self.rows["item"], np.int64)
            by_item[self.item] = ids
            groups[name] = by_item[item]
        return replace(self, user=user, item=item, groups=groups)


def table_rows(store: EventStore) -> dict[str, int]:
    """Rows that the table of each feature needs. Ids are one larger than in the store: row 0 serves unknown ones."""
    groups = {name: int(ids.max(initial=0)) for name, ids in zip(GROUPS, store.catalogue_I2.T)}
    known = {name: largest + 2 for name, largest in groups.items() if largest}
    return {"user": store.users + 1, "item": store.items + 1, **known}


def event_tables(dataset: Dataset) -> tuple[dict[str, int], int]:
    """The tables that click models need for a dataset of events, and the number of dense features."""
    if dataset.folder is None:
        fix = f"recperf data make {dataset.name} --path FOLDER, then --data FOLDER"
        raise UsageError(f"{dataset.name} is generated for dlrm-v4 only", fix=fix)
    return table_rows(open_events(dataset.folder)), 2


def read_events(folder: Path) -> EventRatings:
    """Read all listens of a store into memory."""
    store = open_events(folder)
    kinds = store.kinds(slice(None))
    listens = np.flatnonzero(kinds & ANCHORS)
    item, rows = store.items_at(listens), table_rows(store)
    groups = {
        name: store.catalogue_I2[item, GROUPS.index(name)].astype(np.int64) + 1 for name in rows if name in GROUPS
    }
    return EventRatings(
        name=store.name,
        synthetic=store.synthetic,
        digest=store.digest,
        user=store.users_by_position(listens) + 1,
        item=item + 1,
        rating=(kinds[listens] & LISTEN_PLUS) > 0,
        timestamp=store.times_E[listens].astype(np.int64),
        liked_from=1.0,
        groups=groups,
        rows=rows,
        own_ids={"user": own_ids(store, "user"), "item": own_ids(store, "item")},
    )
