"""Events with a label as click rows, so that dlrm trains on imported ratings: converted once, then reused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ... import locations
from ...errors import notice_once
from ...files import make_folder, writing
from ...folders import one_at_a_time, temporary_folder
from ..datasets import Dataset, legal_name
from ..events.item_table import ItemColumn, columns_of, require_file, titles_of
from ..events.kinds import ANCHORS, POSITIVE
from ..events.manifest import SideKind
from ..events.options import SideRole
from ..events.store import CONTEXT, EventStore, own_ids
from ..files.formats import LIST_MARK
from ..tables import in_blocks, pyarrow
from .encode import MANIFEST, VERSION
from .imports import import_clicks
from .options import ClickOptions

SIDES: tuple[SideRole, SideRole] = ("item", "user")
_CHUNK = 1 << 18


def clicks_of(dataset: Dataset, *, lists: bool = True) -> tuple[Dataset, Path]:
    """A dataset of events as one of clicks, in the cache folder by what decides its rows, and the folder of the events.
    Without `lists`, columns with lists of categories are left out."""
    from ..known.event_files import events_of

    store = events_of(dataset, notice_once)
    features, options = _Features(store, lists=lists), store.imported and store.imported.options
    min_count = options.min_count if options else ClickOptions.min_count
    # Scored rows have the columns of the imported file, whose names are no part of the events' digest.
    identity = json.dumps([store.digest, VERSION, min_count, features.roles, features.kinds])
    folder = locations.home() / "clicks-of-events" / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if not (folder / MANIFEST).is_file():
        with one_at_a_time(folder.with_name(folder.name + ".lock")):
            if not (folder / MANIFEST).is_file():
                lists_of = ", ".join(features.unread)
                without = f" without the lists of {lists_of}, which dlrm reads" if lists_of else ""
                notice_once(f"converting the events of {store.name} to click rows once{without}, in {folder}")
                _convert(store, folder, features, min_count)
    return Dataset(name=dataset.name, kind="clicks", folder=folder, manifest=folder / MANIFEST), store.folder


def _names(store: EventStore) -> dict[str, str]:
    """The names that the columns of the user, the item and the time have in the imported file, where these are names
    and no other column of the rows has them."""
    columns = store.imported.options.columns if store.imported else {}
    names = {role: columns.get(role, role) for role in ("user", "item", "time")}
    is_named = all(name and not name.isdigit() and "," not in name for name in names.values())
    is_free = len({name.lower() for name in names.values()} - {"label"}) == len(names)
    return names if is_named and is_free else {role: role for role in names}


class _Features:
    """The columns of click rows that events have, by names that are free: of user, item and time, of what is known of
    each item and user, and context. Without `lists`, columns with lists of categories are left out."""

    def __init__(self, store: EventStore, *, lists: bool) -> None:
        self.roles, self.left_out = _names(store), ("text",) if lists else ("text", "categories")
        self.kinds: dict[str, SideKind] = {}
        self.unread: list[str] = []
        """Columns with lists that are left out."""
        self.items, self.users = (self._of(columns_of(store, role), role) for role in SIDES)
        context = store.imported.context if store.imported else None
        columns = context.columns.items() if context else ()
        read = ((f"x{at}", name, kind) for at, (name, kind) in enumerate(columns) if kind not in self.left_out)
        self.context = {column: self._free(name, kind, "event") for column, name, kind in read}
        """Names of the columns of the file of context."""

    def _of(self, columns: dict[str, ItemColumn], role: SideRole) -> dict[str, Any]:
        """The values of columns that are features, by number."""
        self.unread += [name for name, one in columns.items() if one.kind == "categories" in self.left_out]
        features = ((name, one) for name, one in columns.items() if one.kind not in self.left_out)
        return {self._free(name, one.kind, role): one.values for name, one in features}

    def _free(self, name: str, kind: SideKind, of: str) -> str:
        """A column's name that options can have and no other column of the rows has."""
        name, taken = name.replace(",", " "), {one.lower() for one in ("label", *self.roles.values(), *self.kinds)}
        while name.lower() in taken or name.isdigit():
            name = f"{of} {name}"
        self.kinds[name] = kind
        return name

    def listed(self, *kinds: SideKind) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind in kinds]


def _convert(store: EventStore, folder: Path, features: _Features, min_count: int) -> None:
    arrow, timed, names = pyarrow(), store.time_order == "time", features.roles
    own = {role: arrow.array(own_ids(store, role)) for role in ("user", "item")}
    context = _context(store, [*features.context]) if features.context else None

    def anchors(part: slice) -> Any:
        """The events with a label among some, with the user's own ids: user, item, what is known of both, context,
        label and time."""
        kinds = store.kinds(part)
        labelled = np.flatnonzero(kinds & ANCHORS)
        positions = labelled + part.start
        places = store.users_of(positions)
        items, users = arrow.array(store.items_at(positions)), arrow.array(store.user_ids_U[places])
        columns = {names["user"]: own["user"].take(arrow.array(places)), names["item"]: own["item"].take(items)}
        columns |= {name: values.take(items) for name, values in features.items.items()}
        columns |= {name: values.take(users) for name, values in features.users.items()}
        if context is not None:
            rows = next(context).take(arrow.array(labelled))
            columns |= dict(zip(features.context.values(), rows.columns))
        columns["label"] = ((kinds[labelled] & POSITIVE) > 0).astype(np.int8)
        return arrow.table(columns | ({names["time"]: store.times_E[positions].astype(np.int64)} if timed else {}))

    make_folder(folder.parent)
    with writing(folder), temporary_folder(".rows-", beside=folder.parent) as draft:
        path = draft / "rows.parquet"
        parquet: Any = None
        for start in range(0, store.events, _CHUNK):
            table = anchors(slice(start, min(store.events, start + _CHUNK)))
            parquet = parquet or pyarrow(".parquet").ParquetWriter(path, table.schema)
            parquet.write_table(table)
        parquet.close()
        options = ClickOptions(
            clicks=path,
            label="label",
            user=names["user"],
            item=names["item"],
            time=names["time"] if timed else None,
            categorical=",".join([names["user"], names["item"], *features.listed("category")]),
            multi=",".join(features.listed("categories")) or None,
            numeric=",".join(features.listed("number")) or None,
            separator=LIST_MARK,
            min_count=min_count,
            name=legal_name(store.name),
        )
        titles = titles_of(store, np.arange(store.items))
        if titles is not None:
            titles = arrow.table({"id": own["item"].cast(arrow.string()), "title": arrow.array(titles, arrow.string())})
        import_clicks(options, folder, split_note=store.split_note, titles=titles)


def _context(store: EventStore, columns: list[str]) -> Iterator[Any]:
    """Columns of the context, in tables as long as the parts that are converted."""
    assert store.imported is not None
    assert store.imported.context is not None
    path = require_file(store, CONTEXT, store.imported.context.sha256)
    batches = pyarrow(".parquet").ParquetFile(str(path)).iter_batches(_CHUNK, columns=columns)
    return in_blocks((pyarrow().Table.from_batches([batch]) for batch in batches), _CHUNK)
