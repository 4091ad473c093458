"""The event store: events as memory-mapped columns, sorted by user, then by time.

Shapes: E events, U users, I items of the catalogue, B samples.

A store is a folder with one file per column and `store.json`, which is written last; a folder without it, or with files
of other lengths, is not opened. Files are mapped shared and read-only, so that all processes share one copy in memory.
Users and groups of items are compared with their digests when the store is opened, events when they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, MachineError
from ...files import read_dataset_file, reading
from ...jsonfile import decode, load, read_sealed, require
from ..blocks import Column, StoredColumn, verified
from ..datasets import KINDS
from .manifest import EventManifest, ImportFacts, Originals

FORMAT, VERSION = KINDS["events"].form
MANIFEST = "store.json"
EVENT_COLUMNS = {"items": "<u4", "times": "<u4", "kinds": "|u1"}
"""One value per event in each, 9 bytes in total."""
USER_COLUMNS = {"user_ids": "<u4", "user_first": "<i8"}
GROUPS = "catalogue"
"""The groups of items, in stores that have them as numbers."""
COLUMNS = {**EVENT_COLUMNS, **USER_COLUMNS, GROUPS: "<u4"}
CONTEXT = "context.parquet"
"""Further columns of the events, in their order."""
EVENT_BYTES = sum(np.dtype(kind).itemsize for kind in EVENT_COLUMNS.values())
DIGEST_BLOCK = 64 << 20
"""Each block of this many bytes has a digest, by which it is verified when it is first read."""
_VERIFIED_BYTES = 4 * DIGEST_BLOCK
"""Bytes that `verify` reads between two calls of its progress."""

Which = slice | NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class EventStore:
    """Mapped columns of events."""

    layout: ClassVar[str] = "packed"
    folder: Path
    user_ids_U: NDArray[np.int64]
    """Ids of the users, ascending."""
    user_first_U1: NDArray[np.int64]
    """Position of each user's first event; the last entry is the number of events."""
    items_E: Column
    times_E: Column
    """Seconds since the dataset's origin."""
    groups_IG: NDArray[np.uint32]
    """The groups of every item as numbers; 0 where unknown. `manifest.groups` names them; those of
    imported items are columns of their table (item_table.py)."""
    kind_columns: tuple[Column, ...]
    """The columns that `kinds` reads: one, with a byte for every event (kinds.py)."""
    manifest: EventManifest
    tables: tuple[Column, ...] = ()
    """The columns of users and groups, which were verified when the store was opened."""

    @property
    def events(self) -> int:
        return len(self.times_E)

    @property
    def users(self) -> int:
        return len(self.user_ids_U)

    @property
    def items(self) -> int:
        """Ids of items run from 0 to one less."""
        return len(self.groups_IG)

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def synthetic(self) -> bool:
        return self.manifest.synthetic

    @property
    def digest(self) -> str:
        """Digest of the content; of a reference cache, of its sizes and samples. See `verified`."""
        return self.manifest.digest

    @property
    def imported(self) -> ImportFacts | None:
        return self.manifest.imported

    @property
    def originals(self) -> dict[str, Originals]:
        """The lists of original ids by role: users and items."""
        return self.imported.originals if self.imported else {}

    @property
    def distinct_items(self) -> int:
        """The number of items that an import had events of; otherwise that of all ids."""
        return self.imported.distinct["items"] if self.imported else self.items

    @property
    def time_order(self) -> str:
        """The order of the events: by time, or the order that an import used for a file without times."""
        return self.imported.time_order if self.imported else "time"

    @property
    def split_note(self) -> str:
        """What the description of a split should say about an import: no times, drawn negatives."""
        order, negatives = self.time_order, self.imported and self.imported.negatives
        note = "" if order == "time" else f"; events without times, in {order}"
        return note + (f"; {negatives.per_event} negatives drawn per event, {negatives.by}" if negatives else "")

    @property
    def stored_per_event(self) -> int:
        """Events stored for every event that happened: more than 1 where an import drew negatives."""
        return 1 + (self.imported.negatives.per_event if self.imported and self.imported.negatives else 0)

    @property
    def columns(self) -> tuple[Column, ...]:
        return (self.items_E, self.times_E, *self.kind_columns)

    def verified(self) -> dict[str, int]:
        """Bytes of the store that this process compared with their digests, and bytes of all its columns."""
        facts = verified((*self.columns, *self.tables))
        stated = sum(column.bytes for column in self.manifest.columns.values())
        return {**facts, "of": stated or facts["of"]}

    def items_at(self, which: Which) -> NDArray[np.int64]:
        """Items of some events. One outside the catalogue is an error: callers allocate arrays by the largest item."""
        items = self.items_E[which].astype(np.int64)
        if len(items) and not 0 <= items.min() <= items.max() < self.items:
            raise DataError(
                f"the event store is damaged: an event has an item outside the catalogue of {self.items:,} items",
                where={"store": self.folder},
                fix="recperf data check locates the damage; then prepare it again",
            )
        return items

    def users_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices in `user_ids_U` of the users of some events."""
        return np.searchsorted(self.user_first_U1[:-1], positions, side="right") - 1

    def first_at(
        self, first_N: NDArray[np.int64], stop_N: NDArray[np.int64], times_N: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The positions of the first events at or after some times, each between two positions of one user: a binary
        search of all at once."""
        low_N, high_N = first_N.copy(), stop_N.copy()
        while (open_N := np.flatnonzero(low_N < high_N)).size:
            middle = (low_N[open_N] + high_N[open_N]) // 2
            earlier = self.times_E[middle] < times_N[open_N]
            low_N[open_N] = np.where(earlier, middle + 1, low_N[open_N])
            high_N[open_N] = np.where(earlier, high_N[open_N], middle)
        return low_N

    def kinds(self, which: Which) -> NDArray[np.uint8]:
        """Kinds of some events, by a slice or by positions."""
        return np.asarray(self.kind_columns[0][which])


def open_store(folder: Path) -> EventStore:
    """Open a complete store; anything else is an error."""
    folder = folder.expanduser()
    manifest = read_manifest(folder)
    mapped = {name: _mapped(folder, name, manifest) for name in stored_columns(manifest.groups)}
    tables = {name: column[:] for name, column in mapped.items() if name not in EVENT_COLUMNS}
    groups = tables.get(GROUPS, np.zeros(0, np.uint32))
    return EventStore(
        folder=folder,
        user_ids_U=tables["user_ids"].astype(np.int64),
        user_first_U1=tables["user_first"],
        items_E=mapped["items"],
        times_E=mapped["times"],
        kind_columns=(mapped["kinds"],),
        groups_IG=groups.reshape(manifest.items, len(manifest.groups)),
        manifest=manifest,
        tables=tuple(mapped[name] for name in tables),
    )


def read_manifest(folder: Path) -> EventManifest:
    path = folder / MANIFEST
    try:
        exists = path.is_file()
    except OSError as error:
        what = f"{path.name} cannot be read: {error.strerror or error}"
        raise MachineError(what, where={"file": path}, fix="check its permissions and the disk") from error
    if not exists and is_store_folder(folder):
        raise DataError(
            f"this store is not complete: {MANIFEST}, which is written last, is missing",
            where={"folder": folder},
            fix=f"run the command that wrote it again, or remove {folder}",
        )
    if not exists:
        raise DataError("there is no event store here", where={"folder": folder}, fix="recperf data prepare --help")
    value: dict[str, Any] = read_sealed(path, (FORMAT, VERSION), dict, fix=_anew(path))
    manifest = require(value, EventManifest, path, what="is damaged")
    if "import" in value:
        manifest.imported = require(value, ImportFacts, path, what="is damaged")
    return manifest


def _anew(path: Path) -> str:
    """The command that makes a store that cannot be read anew."""
    try:
        value = load(path, follow_links=True)
        imported = value.get("import")
        file = shlex.quote(str(imported["events"])) if imported else ""
        name = shlex.quote(str(value["name"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError):
        return f"remove {path.parent} and prepare it again"
    if imported:
        return f"recperf data import {file} --name {name} --replace, with the other options as before"
    return f"remove {path.parent}, then recperf data prepare {name}"


def own_ids(store: EventStore, role: str) -> list[int | str]:
    """The ids that users (role user) or items (role item) have in the file that was imported, by their numbers in the
    store; an item without events keeps the id of the store."""
    numbers = store.user_ids_U.tolist() if role == "user" else list(range(store.items))
    if f"{role}s" not in store.originals:
        return numbers
    listed = originals(store.folder, f"{role}s")
    unlisted = str if store.originals[f"{role}s"].kind == "text" else int
    return [listed[number - 1] if 0 < number <= len(listed) else unlisted(number) for number in numbers]


def own_name(store: EventStore, role: str) -> str:
    """The name of a role's column in the imported file; the role itself where it has none."""
    column = store.imported.options.columns.get(role, role) if store.imported else role
    return role if not column or column.isdecimal() else column


def originals(folder: Path, role: str) -> list[int | str]:
    """The ids in the imported file: entry k - 1 is that of id k. Roles: users and items."""
    path, imported = folder / f"{role}.jsonl", read_manifest(folder).imported
    if imported is None or role not in imported.originals:
        what = f"this store has no list of its original {role}"
        raise DataError(what, where={"file": path}, fix="recperf data import writes one")
    try:
        with reading(path):
            content = read_dataset_file(path) if os.path.lexists(path) else b""
    except DataError as error:
        raise DataError(f"the event store is damaged: {error.what}", where={"file": path}, fix=error.fix) from None
    if hashlib.sha256(content).hexdigest() != imported.originals[role].sha256:
        what = f"the event store is damaged: {path.name} is not the file that was written"
        raise DataError(what, where={"file": path}, fix=f"remove {folder} and import it again")
    return cast(list[int | str], decode(b"[" + content.rstrip(b"\n").replace(b"\n", b",") + b"]"))


def content_digest(manifest: EventManifest) -> str:
    """One digest of all that is stored: of columns, computed from those of their blocks, and of the other files."""
    columns, facts = manifest.columns, manifest.imported
    content: list[Any] = [[name, columns[name].bytes, columns[name].blocks] for name in sorted(columns)]
    if facts is not None:
        digests = {role: one.sha256 for role, one in facts.originals.items()}
        digests |= {role: one.sha256 for role, one in facts.tables.items()}
        content += [*digests.items(), facts.context.sha256 if facts.context else ""]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def is_store_folder(folder: Path) -> bool:
    """Whether a folder is an event store, complete or not. A store is written in the folder `<name>.building`."""
    unfinished = bool(folder.name) and folder.with_name(f"{folder.name}.building").is_dir()
    files = [folder / MANIFEST, *(file_of(folder, name) for name in COLUMNS)]
    return unfinished or any(file.exists() for file in files)


def stored_columns(groups: Sequence[str]) -> list[str]:
    """The columns of a store whose items have these groups."""
    return [name for name in COLUMNS if groups or name != GROUPS]


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.{np.dtype(COLUMNS[name]).str[1:]}"


def stored_column(folder: Path, name: str) -> StoredColumn:
    return StoredColumn.of(file_of(folder, name), COLUMNS[name], block=DIGEST_BLOCK)


def verify(store: EventStore, progress: Callable[[int, int], None] | None = None) -> None:
    """Compare every byte of a packed store with its digests; the first difference is an error."""
    columns = store.manifest.columns
    total, done = sum(column.bytes for column in columns.values()), 0
    for name in stored_columns(store.manifest.groups):
        # Mapped again: the store may have verified some of it long ago.
        column = _mapped(store.folder, name, store.manifest)
        assert column.blocks is not None
        for first in range(0, column.blocks.bytes, _VERIFIED_BYTES):
            stop = min(column.blocks.bytes, first + _VERIFIED_BYTES)
            column.blocks.require(first, stop)
            done += stop - first
            if progress:
                progress(done, total)
    if content_digest(store.manifest) != store.digest:
        raise _damaged(store.folder / MANIFEST, "has a digest that its columns do not have")


def _mapped(folder: Path, name: str, manifest: EventManifest) -> Column:
    stated = manifest.columns.get(name)
    if stated is None:
        raise _damaged(folder / MANIFEST, f"has no entry for {name}")
    return stated.mapped(file_of(folder, name), COLUMNS[name], block=DIGEST_BLOCK, damaged=_damaged)


def _damaged(path: Path, how: str) -> DataError:
    return DataError(
        f"the event store is damaged: {path.name} {how}",
        where={"file": path},
        fix=f"remove {path.parent} and prepare it again; recperf data check reads all of a store",
    )
