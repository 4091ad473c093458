"""The listens of an event store as click rows, so that dlrm trains on imported ratings: converted once, then reused."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from ... import locations
from ...errors import notice_once
from ...files import make_folder, writing
from ...folders import one_at_a_time, temporary_folder
from ..datasets import Dataset, legal_name
from ..events.item_features import read_items
from ..events.kinds import ANCHORS, LISTEN_PLUS
from ..events.store import EventStore, originals, own_ids
from ..files.formats import LIST_MARK, LIST_ROLE
from ..tables import is_text, pyarrow
from .encode import MANIFEST, VERSION
from .imports import import_clicks
from .options import ClickOptions

_CHUNK = 1 << 18


def clicks_of(dataset: Dataset) -> tuple[Dataset, Path]:
    """A dataset of events as one of clicks, in the cache folder by the digest of the events and a store's version, and
    the folder of the events."""
    from ..known.event_files import events_of

    store = events_of(dataset, notice_once)
    names = _names(store)
    # Scored rows have the columns of the imported file, whose names are no part of the events' digest.
    own = "".join(f"-{legal_name(names[role])}" for role in names if names[role] != role)
    # So are the features of items.
    items = store.imported and store.imported.item_file
    own += f"-{items.sha256[:16]}" if items else ""
    folder = locations.home() / "clicks-of-events" / f"{store.digest[:32]}-{VERSION}{own}"
    if not (folder / MANIFEST).is_file():
        with one_at_a_time(folder.with_name(folder.name + ".lock")):
            if not (folder / MANIFEST).is_file():
                notice_once(f"converting the events of {store.name} to click rows once, in {folder}")
                _convert(store, folder, names)
    return Dataset(name=dataset.name, kind="clicks", folder=folder, manifest=folder / MANIFEST), store.folder


def _names(store: EventStore) -> dict[str, str]:
    """The names that the columns of the user, the item and the time have in the imported file, where these are names
    and no other column of the rows has them."""
    columns = store.imported.options.columns if store.imported else {}
    names = {role: columns.get(role, role) for role in ("user", "item", "time")}
    is_named = all(name and not name.isdigit() and "," not in name for name in names.values())
    is_free = len({name.lower() for name in names.values()} - {"label"}) == len(names)
    return names if is_named and is_free else {role: role for role in names}


def _free(name: str, taken: Collection[str]) -> str:
    """A column's name that options can have and no other column of the rows has."""
    name = name.replace(",", " ")
    while name.lower() in taken or name.isdigit():
        name = f"item {name}"
    return name


def _convert(store: EventStore, folder: Path, names: dict[str, str]) -> None:
    arrow, timed = pyarrow(), store.time_order == "time"
    taken = {"label", *(name.lower() for name in names.values())}
    by_item = {_free(name, taken): values for name, values in _groups(store).items()}
    several = _several(by_item)
    own = {role: arrow.array(own_ids(store, role)) for role in ("user", "item")}

    def listens(part: slice) -> Any:
        """The listens among some events, with the user's own ids: user, item, groups of the item, label and time."""
        kinds = store.kinds(part)
        positions = np.flatnonzero(kinds & ANCHORS) + part.start
        items = arrow.array(store.items_at(positions))
        columns = {
            names["user"]: own["user"].take(arrow.array(store.users_of(positions))),
            names["item"]: own["item"].take(items),
            **{name: values.take(items) for name, values in by_item.items()},
            "label": ((kinds[positions - part.start] & LISTEN_PLUS) > 0).astype(np.int8),
        }
        return arrow.table(columns | ({names["time"]: store.times_E[positions].astype(np.int64)} if timed else {}))

    make_folder(folder.parent)
    with writing(folder), temporary_folder(".rows-", beside=folder.parent) as draft:
        path = draft / "rows.parquet"
        parquet: Any = None
        for start in range(0, store.events, _CHUNK):
            table = listens(slice(start, min(store.events, start + _CHUNK)))
            parquet = parquet or pyarrow(".parquet").ParquetWriter(path, table.schema)
            parquet.write_table(table)
        parquet.close()
        options = ClickOptions(
            clicks=path,
            label="label",
            user=names["user"],
            item=names["item"],
            time=names["time"] if timed else None,
            categorical=",".join([names["user"], names["item"], *(name for name in by_item if name not in several)]),
            multi=",".join(several) or None,
            separator=LIST_MARK,
            name=legal_name(store.name),
        )
        import_clicks(options, folder, split_note=store.split_note)


def _groups(store: EventStore) -> dict[str, Any]:
    """What is known of each item, by the names of the columns in the user's files: the features of a file of items,
    else the groups of items that the events have. Several values of an item are one text."""
    arrow, stored = pyarrow(), read_items(store)
    if stored is not None and stored.features:
        return {name: arrow.array(feature.texts(LIST_MARK)) for name, feature in stored.features.items()}
    options = store.imported.options if store.imported else None
    sets = options is not None and getattr(options, LIST_ROLE) is not None and options.album is None
    by_item = {}
    for position, role in enumerate(("artist", "album")):
        ids_I = store.catalogue_I2[:, position].astype(np.int64)
        if ids_I.any() and not (sets and role == "artist"):
            listed = originals(store.folder, f"{role}s") if f"{role}s" in store.originals else None
            known = arrow.array([None, *(listed or range(1, int(ids_I.max()) + 1))])
            role = LIST_ROLE if sets else role
            column = options.columns.get(role, role) if options is not None else role
            by_item[column] = known.take(arrow.array(ids_I))
    return by_item


def _several(by_item: dict[str, Any]) -> list[str]:
    """The columns of which some item has several values."""
    compute = pyarrow(".compute")
    return [
        name
        for name, values in by_item.items()
        if is_text(values) and compute.any(compute.match_substring(values, LIST_MARK)).as_py()
    ]
