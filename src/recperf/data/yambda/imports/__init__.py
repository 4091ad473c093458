"""Bring your own events: a log of who took what and when, as CSV, JSON lines or Parquet, becomes an event store.

Rows may come in any order: DuckDB sorts them by user, time and place in the file, within a memory limit and with
temporary files beside the store. Every user has at least one event, because users are known only by their rows. There
is no split by time: that is Yambda's own rule. A log without labels gets drawn negatives, one without times an order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ....config import to_json
from ....errors import DataError
from ....files import sha256
from ....folders import remove_folder
from ...user_files.database import RESTART, column_types, fetch_row, open_database
from ...user_files.load import load_file
from ...user_files.source import Source, inspect, require_role
from ...user_files.text_rows import BadRows
from ..import_options import ImportOptions
from ..manifest import Days, DrawnNegatives, ImportFacts, Manifest
from ..schema import LEAST_PLAYED
from ..store import MANIFEST, kinds_of, read_manifest
from ..writer import OURS, StoreWriter, finished
from .convert import ID_ROLES, convert
from .ids import catalogue, number_ids, write_originals
from .item_file import ItemFile
from .negatives import Events, Negatives

__all__ = ["ImportOptions", "import_events"]

LICENCE = "that of the source"
HELD_OUT = 0.2
"""Share of the latest events that workloads hold out by default."""
QUANTILES = {"min": 0.0, "p20": 0.2, "p50": 0.5, "p80": 0.8, "max": 1.0}
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
    source = inspect(
        options.events,
        {} if options.sequences else options.columns,
        delimiter=options.delimiter,
        header=options.header,
        recognised=options.recognised,
        sequences=options.sequences,
    )
    for role in ("user", "item"):
        require_role(source, role)
    options = options.with_columns({role: source.names[position] for role, position in source.columns.items()})
    source = dataclasses.replace(source, columns={role: source.columns[role] for role in options.columns})
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
            remove_folder(writer.draft, OURS)
            raise


def _identifying(options: ImportOptions) -> dict[str, Any]:
    """The options that decide what is in a store; the folders of the files and the memory do not."""
    identifying = {name: value for name, value in to_json(options).items() if name not in ("events", "memory_mib")}
    if options.items is None:
        # A store that was written before there were files of items has none of these.
        return {name: value for name, value in identifying.items() if not name.startswith("items")}
    try:
        return {**identifying, "items": sha256(options.items.expanduser())}
    except OSError as error:
        what = f"the file of items cannot be read: {error.strerror}"
        raise DataError(what, where={"file": options.items}, fix="check --items") from None


def _refuse_other_options(folder: Path, identity: dict[str, Any]) -> None:
    if not (folder / MANIFEST).is_file():
        return
    existing = read_manifest(folder).identity
    before = existing.get("options", {}) if existing.get("sha256") == identity["sha256"] else {}
    now = identity["options"]
    changed = [
        f"{name} {before.get(name, 'not set')}, now {now.get(name, 'not set')}"
        for name in {**before, **now}
        if before and before.get(name) != now.get(name)
    ]
    if changed:
        raise DataError(
            f"a store of this file exists already, with other options: {', '.join(changed)}",
            where={"folder": folder},
            fix="choose another with --store or --name, or remove it",
        )


def _build(source: Source, options: ImportOptions, writer: StoreWriter, reading: Progress, sorting: Progress) -> Path:
    with open_database(writer.draft / "sorting", memory=options.memory) as connection:
        bad = BadRows(source.path, options.skip_bad)
        source.require_unchanged(writer.identity["sha256"], load_file(connection, source, reading, bad))
        item_file = ItemFile(connection, options, writer.draft / "sorting", reading) if options.items else None
        if item_file is not None:
            item_file.add_genres()
        options = convert(connection, source, options, bad)
        roles = [role for role in ID_ROLES if f"{role}_id" in column_types(connection, "events")]
        facts = _facts(connection, source, options, roles)
        facts.skipped_rows = bad.skipped
        if options.ids == "dense":
            for role in roles:
                number_ids(connection, role)
                facts.originals[f"{role}s"] = write_originals(connection, role, writer.draft / f"{role}s.jsonl")
        if item_file is not None:
            kept = "(SELECT DISTINCT item_id AS value, item_id AS id FROM events)"
            facts.item_file = item_file.write(writer.draft, "item_ids" if options.ids == "dense" else kept)
        catalogue_I2, facts.items_with_several = catalogue(connection, options)
        negatives = _negatives(connection, options, len(catalogue_I2))
        _write_sorted(connection, writer, sorting, negatives)
        if negatives is not None:
            facts.negatives = DrawnNegatives(
                per_event=options.drawn,
                by=options.negatives_by,
                seed=options.seed,
                drawn=negatives.drawn,
                left_out=negatives.left_out,
            )
    manifest = Manifest(name=options.name, synthetic=False, licence=LICENCE, imported=facts)
    return writer.finish(catalogue_I2, manifest)


def _unused(source: Source) -> list[str]:
    used = set(source.columns.values())
    return [name for position, name in enumerate(source.names) if position not in used and name]


def _order(options: ImportOptions) -> str:
    """What `seconds` mean: times of the file, or an order."""
    if options.time is not None:
        return "time"
    if options.sequences:
        return "the order of each user's items"
    return "random order" if options.order == "random" else "order of the file"


def _days(connection: Any) -> Days:
    # Approximate, since an exact quantile would hold all times in memory.
    held_out = f"approx_quantile(seconds, {1 - HELD_OUT})"
    times = fetch_row(connection, f"SELECT min(seconds), {held_out}, max(seconds) FROM events")
    return Days(*(datetime.fromtimestamp(seconds, UTC).date().isoformat() for seconds in times))


def _facts(connection: Any, source: Source, options: ImportOptions, roles: list[str]) -> ImportFacts:
    """How many different users, items, artists and albums there are, and how the events spread over users and items."""
    count = "SELECT count(*) FROM (SELECT DISTINCT {role}_id FROM events WHERE {role}_id IS NOT NULL)"
    ids = {f"{role}s": fetch_row(connection, count.format(role=role))[0] for role in roles}
    played = f"avg((played >= {LEAST_PLAYED})::INT) FILTER (type_code = 0)"
    events, positive = fetch_row(connection, f"SELECT count(*), {played} FROM events")
    shares = ", ".join(f"quantile_disc(count, {share})" for share in QUANTILES.values())
    per_user = fetch_row(connection, f"SELECT {shares} FROM (SELECT count(*) AS count FROM events GROUP BY user_id)")
    has_times = options.time is not None
    items = options.items and Path(options.items.name)
    return ImportFacts(
        options=dataclasses.replace(options, events=Path(source.path.name), items=items),
        unused_columns=_unused(source),
        time_order=_order(options),
        days=_days(connection) if has_times else None,
        earlier_than_the_event_before=_out_of_order(connection) if has_times else 0,
        distinct=ids,
        events_in_file=events,
        positive_share_in_file=positive,
        density=events / (ids["users"] * ids["items"]),
        events_per_user=dict(zip(QUANTILES, per_user)),
    )


def _out_of_order(connection: Any) -> int:
    """How many events are earlier than the event before them of the same user."""
    previous = "SELECT seconds, lag(seconds) OVER (PARTITION BY user_id ORDER BY row) AS previous FROM events"
    return int(fetch_row(connection, f"SELECT count(*) FROM ({previous}) WHERE seconds < previous")[0])


def _negatives(connection: Any, options: ImportOptions, items: int) -> Negatives | None:
    """Draws for a log without labels; none for others."""
    if not options.drawn:
        return None
    counts_I = np.zeros(items, np.int64)
    query = "SELECT item_id, count(*) FROM events GROUP BY item_id"
    for batch in connection.sql(query).to_arrow_reader(_BATCH_ROWS):
        item, count = (column.to_numpy() for column in batch.columns)
        counts_I[item] = count
    popularity = options.negatives_by == "popularity"
    return Negatives(options.drawn, counts_I, by_popularity=popularity, seed=options.seed)


def _write_sorted(connection: Any, writer: StoreWriter, progress: Progress, negatives: Negatives | None) -> None:
    """Append all events by user and time; those of one second keep the order of the file."""
    total, written = fetch_row(connection, "SELECT count(*) FROM events")[0], 0
    progress(written, total)
    query = """
        SELECT user_id, item_id, seconds, type_code, if(type_code = 0, played, 0)::USMALLINT
        FROM events ORDER BY user_id, seconds, row"""
    waiting: Events | None = None
    for batch in connection.sql(query).to_arrow_reader(_BATCH_ROWS):
        users, items, times, types, ratios = (column.to_numpy() for column in batch.columns)
        # Nothing says that a recommender was behind an event.
        kinds = kinds_of(types, ratios, np.ones(len(types), np.uint8))
        events = {"uids": users, "items": items, "times": times, "kinds": kinds}
        if negatives is not None:
            # Whole users only: a negative must not be an item of an earlier batch.
            events = {name: np.concatenate([waiting[name], events[name]]) for name in events} if waiting else events
            whole = int(np.searchsorted(events["uids"], events["uids"][-1]))
            waiting = {name: column[whole:] for name, column in events.items()}
            events = negatives.add({name: column[:whole] for name, column in events.items()})
        writer.append(**events)
        written += len(batch)
        progress(written, total)
    if negatives is not None and waiting is not None:
        writer.append(**negatives.add(waiting))
