"""Bring your own events: a log of who took what and when, as CSV, JSON lines or Parquet, becomes an event store.

Rows may come in any order: DuckDB sorts them by user, time and place in the file, within a memory limit and with
temporary files beside the store. Every user has at least one event, because users are known only by their rows. A log
without labels gets drawn negatives, one without times an order. What is held out is decided afterwards (data/split.py).

Shapes: I items.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime
from pathlib import Path
from time import monotonic
from typing import Any, Final

import numpy as np

from ...config import to_json
from ...errors import DataError
from ...files import sha256, writing
from ...folders import remove_folder
from ...jsonfile import as_json
from ...stop import poll
from ..files.file import Source
from ..files.load import Number, load_file
from ..files.options import repeated_rows
from ..files.source import inspect, require_role
from ..files.text_rows import BadRows
from ..files.values import RESTART, fetch_row, open_database
from ..tables import numbers_of, pyarrow
from . import side_table
from .convert import ID_ROLES, convert, number_ids
from .kinds import ANCHORS, NEGATIVE, POSITIVE
from .manifest import ContextFacts, Days, EventManifest, ImportFacts, RareIds
from .negatives import FIRST_TIMES, Negatives
from .options import SIGNALS, ImportOptions
from .store import CONTEXT, MANIFEST, EventStore, open_store, read_manifest
from .writer import OURS, StoreWriter, finished

ROLES = ("user", "item", "time", *SIGNALS)
"""Roles of columns of events. Those that may belong to items are c0, c1 and so on, and those of context x0, x1, ..."""
NUMBERS: Final[dict[str, Number]] = {
    "user": "BIGINT", "item": "BIGINT", "time": "DOUBLE", "rating": "DOUBLE", "label": "DOUBLE"
}  # fmt: skip
"""What columns may be stored as."""
QUANTILES = {"min": 0.0, "p20": 0.2, "p50": 0.5, "p80": 0.8, "max": 1.0}
_NOT_IDENTIFYING = ("events", "memory_mib", "licence")
_BATCH_ROWS = 1 << 17

Progress = Callable[[int, int], None]


def import_dataset(options: ImportOptions, folder: Path, *, progress: Callable[..., Progress]) -> dict[str, Any]:
    """Import events from a file of the user as a store, and describe it."""
    folder, began = folder.expanduser(), monotonic()
    existed = (folder / MANIFEST).is_file()
    import_events(options, folder, reading=progress("reading", "bytes"), sorting=progress("sorting"))
    store, seconds = open_store(folder), monotonic() - began
    return {
        **described(store),
        "name": options.name,
        "folder": str(folder),
        "imported": not existed,
        "notes": list(_notes(store.imported)) if store.imported else [],
        "seconds": round(seconds, 2),
    }


def described(store: EventStore) -> dict[str, Any]:
    """What an imported dataset holds."""
    manifest, facts = store.manifest, store.imported
    assert facts is not None
    labelled = manifest.count(ANCHORS)
    return {
        **as_json(facts),
        "events": manifest.events,
        "users": facts.distinct["users"],
        "items": facts.distinct["items"],
        "labelled": labelled,
        "positive_share": manifest.count(POSITIVE) / labelled if labelled else None,
        "store_bytes": sum(column.bytes for column in manifest.columns.values()),
        "digest": store.digest,
        "licence": manifest.licence,
    }


def _notes(facts: ImportFacts) -> Iterator[str]:
    """What a user should know about an import, one sentence each."""
    if facts.distinct["users"] == 1:
        yield "all rows have the same user: check --user"
    if facts.time_order == "random order":
        yield "the file has no time: events are in random order, and each user's last one is held out; or: --order rows"
    elif facts.options.sequences:
        yield "the file has no time: only the order of each user's items is known, and their last items are held out"
    elif facts.time_order == "order of the file":
        yield "the file has no time: the order of its rows is used, and each user's last one is held out"
    elif facts.days and date.fromisoformat(facts.days.last) > datetime.now(UTC).date():
        yield f"the last event is in the future, {facts.days.last}: check --time and --time-unit"
    roles = [role for role in ROLES if role in facts.options.columns]
    yield from repeated_rows(facts.repeated, facts.events_in_file, roles)
    for role, table in facts.tables.items():
        if table.source and table.without:
            yield f"{table.without:,} of {facts.distinct[f'{role}s']:,} {role}s are not in {table.source}"
    share, drawn = facts.positive_share_in_file, facts.negatives
    if drawn:
        yield (
            f"the file has no label: every row is positive, with {drawn.per_event} negatives drawn for each "
            f"({drawn.by}, seed {drawn.seed}), none of them an item of the same user"
        )
        if drawn.left_out:
            yield f"{drawn.left_out:,} negatives could not be drawn: their users have every item"
    elif share in (0.0, 1.0):
        which = "positive" if share else "negative"
        yield f"all rows are {which}: check --positive-from, or draw negatives with --negatives 4 and without a label"


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
        {} if options.sequences else {**options.columns, **options.context_columns},
        delimiter=options.delimiter,
        header=options.header,
        recognised=options.recognised,
        sequences=options.sequences,
        item_columns=options.items is None,
    )
    for role in ("user", "item"):
        require_role(source, role)
    recognisable = {role: source.names[at] for role, at in source.columns.items() if role in ROLES}
    asked, options = options, options.with_columns(recognisable)
    recognised = {role: "name" for role in options.columns if role not in asked.columns}
    if source.time_by_values:
        recognised["time"] = "values"
    read = {role: at for role, at in source.columns.items() if role in options.columns or role not in ROLES}
    source = dataclasses.replace(source, columns=read)
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
            return _build(source, options, recognised, writer, reading, sorting)
        except BaseException:
            remove_folder(writer.draft, OURS)
            raise


def _identifying(options: ImportOptions) -> dict[str, Any]:
    """The options that decide what is in a store; the folders of the files and the memory do not."""
    identifying = {name: value for name, value in to_json(options).items() if name not in _NOT_IDENTIFYING}
    for role, path in options.side_files.items():
        try:
            identifying |= {} if path is None else {f"{role}s": sha256(path.expanduser())}
        except OSError as error:
            what = f"the file of {role}s cannot be read: {error.strerror}"
            raise DataError(what, where={"file": path}, fix=f"check --{role}s") from None
    return identifying


def _refuse_other_options(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse a store of another file, or of the same with other options, which are named."""
    if not (folder / MANIFEST).is_file():
        return
    existing, now, fix = read_manifest(folder).identity, identity["options"], "--replace imports this file in its place"
    fix += "; or another --name or --store"
    if existing.get("sha256") != identity["sha256"]:
        what = f"a dataset of this name exists already, of another file: {existing.get('source')}"
        raise DataError(what, where={"folder": folder}, fix=fix)
    before = existing.get("options", now)
    missing = "not set"
    values = {name: (before.get(name, missing), now.get(name, missing)) for name in {**before, **now}}
    if changed := [f"{name} {then}, now {value}" for name, (then, value) in values.items() if then != value]:
        raise DataError(
            f"a store of this file exists already, with other options: {', '.join(changed)}",
            where={"folder": folder},
            fix=fix,
        )


def _build(
    source: Source,
    options: ImportOptions,
    recognised: dict[str, str],
    writer: StoreWriter,
    reading: Progress,
    sorting: Progress,
) -> Path:
    with open_database(writer.draft / "sorting", memory=options.memory_mib << 20) as connection:
        bad = BadRows(source.path, options.skip_bad)
        load_file(connection, source, reading, bad, numbers=NUMBERS)
        used = {*source.columns.values()}
        unused = {name: "" for at, name in enumerate(source.names) if name and at not in used}
        files = (side_table.of_file(connection, role, options, writer.draft / "sorting", reading) for role in ID_ROLES)
        of_events = side_table.of_events(connection, source, options, unused)
        tables = [table for table in (*files, of_events) if table is not None]
        options = convert(connection, source, options, bad)
        originals = number_ids(connection, writer.draft)
        facts = _facts(connection, source, options)
        facts.skipped_rows, facts.recognised, facts.originals = bad.skipped, recognised, originals
        facts.tables = {table.role: table.write(writer.draft) for table in tables}
        facts.unused_columns = unused | {
            name: why for table in facts.tables.values() if not table.source for name, why in table.left_out.items()
        }
        items = facts.distinct["items"]
        negatives = _negatives(connection, options, items) if options.drawn else None
        facts.context = _context(connection, source, options)
        _write_sorted(connection, writer, sorting, negatives, facts.context)
        if negatives is not None:
            facts.negatives = negatives.facts
    manifest = EventManifest(name=options.name, synthetic=False, licence=options.licence, imported=facts)
    return writer.finish(np.zeros((items + 1, 0), np.uint32), manifest)


def _facts(connection: Any, source: Source, options: ImportOptions) -> ImportFacts:
    """How many different users and items there are, and how the events spread over them."""
    ids, rare = dict[str, int](), dict[str, RareIds]()
    for role in ID_ROLES:
        counts = f"SELECT count(*) AS events FROM events GROUP BY {role}_id"
        few = f"events < {options.min_count}"
        numbers = f"count(*), count(*) FILTER ({few}), sum(events) FILTER ({few}) / sum(events)"
        ids[f"{role}s"], rare_ids, share = fetch_row(connection, f"SELECT {numbers} FROM ({counts})")
        if rare_ids:
            rare[role] = RareIds(ids=rare_ids, share=share)
    events, positive = fetch_row(connection, "SELECT count(*), avg(positive::INT) FROM events")
    per_user = _events_per_user(connection, ids["users"])
    order = "random order" if options.order == "random" else "order of the file"
    if options.sequences:
        order = "the order of each user's items"
    days, repeated = None, 0
    if not options.sequences:
        time = "" if options.time is None else ", seconds"
        different = f"SELECT DISTINCT user_id, item_id, positive{time} FROM events"
        repeated = events - fetch_row(connection, f"SELECT count(*) FROM ({different})")[0]
    if options.time is not None:
        times = fetch_row(connection, "SELECT min(seconds), max(seconds) FROM events")
        days = Days(*(datetime.fromtimestamp(seconds, UTC).date().isoformat() for seconds in times))
    items, users = (path and Path(path.name) for path in (options.items, options.users))
    return ImportFacts(
        options=dataclasses.replace(options, events=Path(source.path.name), items=items, users=users),
        unused_columns={},
        rare=rare,
        time_order=order if days is None else "time",
        days=days,
        repeated=repeated,
        distinct=ids,
        events_in_file=events,
        positive_share_in_file=positive,
        density=events / (ids["users"] * ids["items"]),
        events_per_user=per_user,
    )


def _context(connection: Any, source: Source, options: ImportOptions) -> ContextFacts | None:
    """Give the table `events` the further columns of an event by their kinds, and describe them."""
    context = ContextFacts(columns={}, left_out={}, sha256="")
    values, roles = list[str](), [*options.context_columns]
    for role in roles:
        at = source.columns[role]
        name = source.names[at] or str(at + 1)
        value, kind, why = side_table.kind_of(connection, "events", role, name)
        if kind in (None, "text"):
            context.left_out[name] = why
        else:
            values.append(f"{value} AS x{len(values)}")
            context.columns[name] = kind
    if not roles:
        return None
    selected = ", ".join(["* EXCLUDE " + f"({', '.join(roles)})", *values])
    connection.execute(f"CREATE TABLE described AS SELECT {selected} FROM events")
    for statement in ("DROP TABLE events", "ALTER TABLE described RENAME TO events"):
        connection.execute(statement)
    return context


def _events_per_user(connection: Any, users: int) -> dict[str, int]:
    """Quantiles of the numbers of events of users. There are far fewer different numbers than users, whom a quantile of
    DuckDB would hold in memory."""
    counts = "SELECT count(*) AS events FROM events GROUP BY user_id"
    rows = connection.execute(f"SELECT events, count(*) FROM ({counts}) GROUP BY events ORDER BY events").fetchall()
    events, of_users = np.array(rows, np.int64).T
    # The least number of which at least this share of users have no more.
    ranks = [max(1, math.ceil(share * users)) for share in QUANTILES.values()]
    at_Q = np.searchsorted(np.cumsum(of_users), ranks)
    return dict(zip(QUANTILES, events[at_Q].tolist()))


def _negatives(connection: Any, options: ImportOptions, items: int) -> Negatives:
    """Every item, from 1 to `items`, has events."""
    if options.negatives_by == "uniform":
        return Negatives(options, items, None)
    counts_I = np.zeros(items, np.int64)
    query = "SELECT item_id, count(*) FROM events GROUP BY item_id"
    for batch in connection.sql(query).to_arrow_reader(_BATCH_ROWS):
        item, count = map(numbers_of, batch.columns)
        counts_I[item.astype(np.int64) - 1] = count
    return Negatives(options, items, counts_I)


def _write_sorted(
    connection: Any,
    writer: StoreWriter,
    progress: Progress,
    negatives: Negatives | None,
    context: ContextFacts | None,
) -> None:
    """Append all events by user and time; those of one second keep the order of the file. Drawn negatives have the
    further columns of their event."""
    total, written = fetch_row(connection, "SELECT count(*) FROM events")[0], 0
    progress(written, total)
    columns = [f"x{at}" for at in range(len(context.columns))] if context else []
    more = "".join(f", {column}" for column in columns)
    rows = f"SELECT user_id, item_id, seconds, positive{more}, row FROM events"
    if negatives is not None:
        rows += f" UNION ALL BY NAME {FIRST_TIMES}"
    kind = f"CASE WHEN coalesce(positive, true) THEN {POSITIVE} ELSE {NEGATIVE} END::UTINYINT"
    selected = f"user_id, item_id, seconds, {kind}, (positive IS NULL)::UTINYINT{more}"
    query = f"SELECT {selected} FROM ({rows}) ORDER BY user_id, seconds, row"
    reader, path = connection.sql(query).to_arrow_reader(_BATCH_ROWS), writer.draft / CONTEXT
    with ExitStack() as stack:
        file: Any = None
        if columns:
            schema = pyarrow().schema([reader.schema.field(column) for column in columns])
            stack.enter_context(writing(path, fix=RESTART))
            file = stack.enter_context(pyarrow(".parquet").ParquetWriter(str(path), schema))
        for batch in reader:
            poll()
            users, items, times, kinds, firsts = (numbers_of(batch.column(at)) for at in range(5))
            first = firsts.astype(np.bool_)
            events = {"uids": users, "items": items, "times": times, "kinds": kinds, "rows": np.arange(len(batch))}
            for part in (events,) if negatives is None else negatives.add(events, first):
                row = part.pop("rows")
                writer.append(**part)
                if file:
                    file.write_batch(batch.select(columns).take(pyarrow().array(row)))
            written += len(batch) - int(first.sum())
            progress(written, total)
    if context and columns:
        context.sha256 = sha256(path)
