"""Bring your own events: a log of who took what and when, as CSV, JSON lines or Parquet, becomes an event store.

Rows may come in any order: DuckDB sorts them by user, time and place in the file, within a memory limit and with
temporary files beside the store. Every user has at least one event, because users are known only by their rows. There
is no split by time: that is Yambda's own rule.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ....config import to_json
from ....errors import DataError
from ....files import sha256
from ..store import MANIFEST, kinds_of, read_manifest
from ..writer import StoreWriter, finished
from .convert import ID_ROLES, convert
from .database import RESTART, fetch_row, open_database
from .ids import catalogue, number_ids, originals, write_originals
from .load import load_file
from .options import ImportOptions
from .source import Source, inspect

__all__ = ["ImportOptions", "import_events", "originals"]

LICENCE = "that of the source"
_BATCH_ROWS = 1 << 17

Progress = Callable[[int, int], None]


def import_events(
    options: ImportOptions,
    folder: Path,
    *,
    reading: Progress = lambda *_: None,
    sorting: Progress = lambda *_: None,
) -> Path:
    """Write a store of a user's events. If a row does not fit, the import fails and leaves nothing behind.

    A finished store of the same file and options is left as it is. `reading` is called with the bytes read and the
    bytes of the file, `sorting` with the events written and the number of events.
    """
    source = inspect(options.events, options.columns, delimiter=options.delimiter, header=options.header)
    identity = {
        "source": source.path.name,
        "bytes": source.size,
        "sha256": sha256(source.path),
        "options": _identifying(options),
    }
    _refuse_other_options(folder.expanduser(), identity)
    if finished(folder, identity):
        return folder.expanduser()
    with StoreWriter(folder, identity=identity, again=RESTART) as writer:
        try:
            return _build(source, options, writer, reading, sorting)
        except BaseException:
            shutil.rmtree(writer.draft, ignore_errors=True)
            raise


def _identifying(options: ImportOptions) -> dict[str, Any]:
    """The options that decide what is in a store; the file's folder and the memory do not."""
    return {name: value for name, value in to_json(options).items() if name not in ("events", "memory_mib")}


def _refuse_other_options(folder: Path, identity: dict[str, Any]) -> None:
    if not (folder / MANIFEST).is_file():
        return
    existing = read_manifest(folder)["identity"]
    before = existing.get("options", {}) if existing.get("sha256") == identity["sha256"] else {}
    changed = [
        f"{name} {before[name]}, now {value}"
        for name, value in identity["options"].items()
        if name in before and before[name] != value
    ]
    if changed:
        raise DataError(
            f"a store of this file exists already, with other options: {', '.join(changed)}",
            where={"folder": folder},
            fix="choose another with --store or --name, or remove it",
        )


def _build(source: Source, options: ImportOptions, writer: StoreWriter, reading: Progress, sorting: Progress) -> Path:
    facts: dict[str, Any] = {
        "name": options.name,
        "synthetic": False,
        "licence": LICENCE,
        "import": to_json(dataclasses.replace(options, events=Path(source.path.name))),
    }
    with open_database(writer.draft / "sorting", memory=options.memory) as connection:
        source.require_unchanged(writer.identity["sha256"], load_file(connection, source, reading))
        convert(connection, source, options)
        facts["earlier_than_the_event_before"] = _out_of_order(connection)
        if options.ids == "dense":
            facts["originals"] = {}
            for role in (role for role in ID_ROLES if role in options.columns):
                number_ids(connection, role)
                listed = write_originals(connection, role, writer.draft / f"{role}s.jsonl")
                facts["originals"][f"{role}s"] = listed
        catalogue_I2, facts["items_with_several"] = catalogue(connection, options)
        _write_sorted(connection, writer, sorting)
    return writer.finish(catalogue_I2, facts)


def _out_of_order(connection: Any) -> int:
    """How many events are earlier than the event before them of the same user."""
    previous = "SELECT seconds, lag(seconds) OVER (PARTITION BY user_id ORDER BY row) AS previous FROM events"
    return int(fetch_row(connection, f"SELECT count(*) FROM ({previous}) WHERE seconds < previous")[0])


def _write_sorted(connection: Any, writer: StoreWriter, progress: Progress) -> None:
    """Append all events by user and time; those of one second keep the order of the file."""
    total, written = fetch_row(connection, "SELECT count(*) FROM events")[0], 0
    progress(written, total)
    query = """
        SELECT user_id, item_id, seconds, type_code, if(type_code = 0, played, 0)::USMALLINT
        FROM events ORDER BY user_id, seconds, row"""
    for batch in connection.sql(query).to_arrow_reader(_BATCH_ROWS):
        users, items, times, types, ratios = (column.to_numpy() for column in batch.columns)
        # Nothing says that a recommender was behind an event.
        kinds = kinds_of(types, ratios, np.ones(len(types), np.uint8))
        writer.append(uids=users, items=items, times=times, kinds=kinds, ratios=ratios)
        written += len(batch)
        progress(written, total)
