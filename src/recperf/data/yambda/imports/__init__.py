"""Bring your own events: a log of who took what and when, as CSV or parquet, becomes an event store.

Rows may come in any order; a user's events are sorted by time, and those of one second stay in the order of the file.
Memory is bounded whatever the number of events; it grows only with the number of distinct ids. Every user has at least
one event, because users are known only by their rows. There is no split by time: that is Yambda's own rule.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....config import to_json
from ....errors import DataError
from ....files import sha256
from ..store import MANIFEST, kinds_of, read_manifest
from ..writer import StoreWriter, finished
from . import values
from .ids import Attribute, Ids, originals
from .options import ImportOptions
from .read import Batch, Source, look
from .sort import RECORD, Spool, write_sorted

__all__ = ["ImportOptions", "import_events", "originals"]

LICENCE = "that of the source"
_AGAIN = "the same command begins anew"

Reading = Callable[[int, int, int], None]
"""Called with the bytes of the file that are taken in, those of the whole file, and the events in them."""
Sorting = Callable[[int, int], None]
"""Called with the events that are in the store, and how many there will be."""


def import_events(
    options: ImportOptions, folder: Path, *, reading: Reading | None = None, sorting: Sorting | None = None
) -> Path:
    """Write a store of someone's events. A file that does not fit is refused whole, and nothing of it stays.

    A store of the same file by the same options that is there already is left as it is.
    """
    source = look(options.events, options.columns, delimiter=options.delimiter, header=options.header)
    identity = {
        "source": source.path.name,
        "bytes": source.bytes,
        "sha256": sha256(source.path),
        "options": _that_matter(options),
    }
    _refuse_other_options(folder.expanduser(), identity)
    if finished(folder, identity):
        return folder.expanduser()
    with StoreWriter(folder, identity=identity, again=_AGAIN) as writer:
        try:
            quiet = lambda *_: None  # noqa: E731
            return _Import(options, source, writer, reading or quiet, sorting or quiet).run()
        except BaseException:
            shutil.rmtree(writer.draft, ignore_errors=True)
            raise


def _that_matter(options: ImportOptions) -> dict[str, Any]:
    """Options that decide what is in a store; where the file lies and how much memory there is do not."""
    return {name: value for name, value in to_json(options).items() if name not in ("events", "memory_mib")}


def _refuse_other_options(folder: Path, identity: dict[str, Any]) -> None:
    if not (folder / MANIFEST).is_file():
        return
    there = read_manifest(folder)["identity"]
    before = there.get("options", {}) if there.get("sha256") == identity["sha256"] else {}
    other = [name for name, value in identity["options"].items() if name in before and before[name] != value]
    if other:
        changed = ", ".join(f"{name} {before[name]}, now {identity['options'][name]}" for name in other)
        raise DataError(
            f"there is a store of this file already, by other options: {changed}",
            where={"folder": folder},
            fix="choose another with --store or --name, or remove it",
        )


class _Import:
    def __init__(
        self, options: ImportOptions, source: Source, writer: StoreWriter, reading: Reading, sorting: Sorting
    ) -> None:
        self.options, self.source, self.writer = options, source, writer
        self.reading, self.sorting = reading, sorting
        self.ids = {
            role: Ids(role, options.ids, optional=role in ("artist", "album"))
            for role in ("user", "item", "artist", "album")
            if role in options.columns
        }
        self.attributes = {role: Attribute() for role in ("artist", "album") if role in self.ids}
        self.spool = Spool(writer.draft / "sorting", fix=_AGAIN)

    def run(self) -> Path:
        with self.spool:
            self._read()
        users_C, items = self.ids["user"].final(), self.ids["item"].final()
        catalogue_I2 = self._catalogue(items)
        late = write_sorted(
            self.spool,
            self.writer,
            users_C=users_C,
            items=items,
            memory=self.options.memory,
            progress=self.sorting,
        )
        shutil.rmtree(self.spool.folder)
        return self.writer.finish(catalogue_I2, self._facts(late))

    def _read(self) -> None:
        for batch in self.source.batches(self.options.memory):
            try:
                self.spool.append(self._records(batch))
            except values.BadValue as error:
                raise DataError(
                    f"row {batch.first + error.row + 1:,}: {error.what}",
                    where={"file": self.source.path},
                    fix=error.fix or "repair or remove that row, or check which column is which",
                ) from None
            self._check_memory()
            self.reading(min(batch.read, self.source.bytes), self.source.bytes, self.spool.events)
        if not self.spool.events:
            only = "a header and no events" if self.source.header_lines else "no events"
            raise DataError(f"the file has {only}", where={"file": self.source.path}, fix="name a file with events")

    def _records(self, batch: Batch) -> NDArray[np.void]:
        columns, options = batch.columns, self.options
        records = np.empty(len(columns["user"]), RECORD)
        records["user"] = self.ids["user"].codes(columns["user"])
        records["item"] = self.ids["item"].codes(columns["item"])
        records["time"] = values.times(columns["time"], options.time_unit)
        types = values.types(columns["type"]) if "type" in columns else np.zeros(len(records), np.uint8)
        ratios = values.signals(columns[options.signal], options.signal, options.positive_from, types == 0)
        records["ratio"] = ratios
        # Nothing says that a recommender was behind an event.
        records["kind"] = kinds_of(types, ratios, np.ones(len(records), np.uint8))
        for role, attribute in self.attributes.items():
            attribute.take(records["item"], self.ids[role].codes(columns[role]), len(self.ids["item"]))
        return records

    def _check_memory(self) -> None:
        held = sum(ids.bytes for ids in self.ids.values())
        if held > self.options.memory // 2:
            counts = ", ".join(f"{len(ids):,} {role}s" for role, ids in self.ids.items())
            raise DataError(
                f"the distinct ids do not fit into {self.options.memory >> 20:,} MiB: {counts} so far",
                where={"file": self.source.path},
                fix="give --memory-mib more, or ids that are integers, which take a sixth of text",
            )

    def _catalogue(self, items: NDArray[np.uint32]) -> NDArray[np.uint32]:
        rows = int(items.max()) + 1
        if rows * 8 > self.options.memory // 2:
            raise DataError(
                f"item {rows - 1:,} would need a catalogue of {rows * 8 >> 20:,} MiB for {len(items):,} items",
                where={"file": self.source.path},
                fix="--ids dense, or a larger --memory-mib",
            )
        catalogue_I2 = np.zeros((rows, 2), np.uint32)
        for column, role in enumerate(("artist", "album")):
            if role in self.attributes:
                catalogue_I2[items, column] = self.attributes[role].final(self.ids[role].final(), len(items))
        return catalogue_I2

    def _facts(self, late: int) -> dict[str, Any]:
        options = dataclasses.replace(self.options, events=Path(self.source.path.name))
        facts: dict[str, Any] = {
            "name": self.options.name,
            "synthetic": False,
            "licence": LICENCE,
            "import": to_json(options),
            "earlier_than_the_event_before": late,
            "items_with_several": {f"{role}s": found.disputed for role, found in self.attributes.items()},
        }
        if self.options.ids == "dense":
            facts["originals"] = {
                f"{role}s": ids.write_originals(self.writer.draft / f"{role}s.jsonl", fix=_AGAIN)
                for role, ids in self.ids.items()
            }
        return facts
