"""Listening events as ratings, so that click models train on an event store: a listen is a click if it was played."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import notice_once
from ..datasets import Dataset
from ..ratings import Ints, Ratings
from ..user_files.load import LIST_MARK
from .reference import open_events
from .schema import ANCHORS, LISTEN_PLUS
from .store import EventStore, originals, own_ids

GROUPS = ("artist", "album")
GENRES_USED = 12
"""Genres that become dense features, the most common ones."""
USER_NUMBERS = 2
"""Dense features that `clicks.build` adds: mean label and count of the user."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EventRatings(Ratings):
    """The listens of an event store. `groups` has the artist and the album of every listen, as far as any is known."""

    groups: dict[str, Ints]
    rows: dict[str, int]
    genres: dict[str, NDArray[np.uint8]]
    """For each of the most common genres, by the id of an item: whether it has the genre."""

    def id_features(self) -> dict[str, tuple[Ints, int]]:
        ids = {"user": self.user, "item": self.item, **self.groups}
        return {name: (ids[name], rows) for name, rows in self.rows.items()}

    def item_features(self) -> dict[str, NDArray[Any]]:
        return {name: flags[self.item] for name, flags in self.genres.items()}

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


def genre_flags(store: EventStore) -> dict[str, NDArray[np.uint8]]:
    """For each of the most common genres, by the id of an item: 1 if it has the genre. Albums are sets of genres."""
    options = store.manifest.get("import", {})
    if options.get("genres") is None or options.get("album") is not None:
        return {}
    sets = [set[str](), *(set(str(text).split(LIST_MARK)) for text in originals(store.folder, "albums"))]
    # An item of the store is one larger as an id; 0 is an unknown one.
    album_R = np.concatenate([[0], store.catalogue_I2[:, 1]])
    counts: Counter[str] = Counter()
    for genres, items in zip(sets, np.bincount(album_R, minlength=len(sets)).tolist()):
        counts.update(dict.fromkeys(genres, items))
    common = sorted(counts, key=lambda genre: (-counts[genre], genre))[:GENRES_USED]
    return {genre: np.array([genre in genres for genres in sets], np.uint8)[album_R] for genre in common}


def stored(dataset: Dataset) -> Path:
    """The folder of a dataset of events; synthetic ones are generated if they are not there yet."""
    if dataset.folder is not None:
        return dataset.folder
    from .catalogue import embedded

    return embedded(say=notice_once).folder


def event_tables(dataset: Dataset) -> tuple[dict[str, int], int]:
    """The tables that click models need for a dataset of events, and the number of dense features."""
    store = open_events(stored(dataset))
    return table_rows(store), USER_NUMBERS + len(genre_flags(store))


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
        user=store.users_of(listens) + 1,
        item=item + 1,
        rating=(kinds[listens] & LISTEN_PLUS) > 0,
        timestamp=store.times_E[listens].astype(np.int64),
        liked_from=1.0,
        groups=groups,
        rows=rows,
        genres=genre_flags(store),
        split_note=store.split_note,
        own_ids={"user": own_ids(store, "user"), "item": own_ids(store, "item")},
    )
