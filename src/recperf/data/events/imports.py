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
from datetime import UTC, date, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from ...config import to_json
from ...errors import DataError
from ...files import sha256
from ...folders import remove_folder
from ...jsonfile import as_json
from ...stop import poll
from ..files.file import Source
from ..files.load import load_file
from ..files.source import inspect, require_role
from ..files.text_rows import BadRows
from ..files.values import RESTART, column_types, fetch_row, open_database
from .convert import ID_ROLES, catalogue, convert, number_ids
from .item_file import ItemFile
from .kinds import LISTEN_PLUS, ORGANIC, SKIP
from .manifest import Days, EventManifest, ImportFacts
from .negatives import FIRST_TIMES, Negatives
from .options import ImportOptions
from .store import MANIFEST, EventStore, open_store, read_manifest
from .writer import OURS, StoreWriter, finished

LICENCE = "that of the source"
QUANTILES = {"min": 0.0, "p20": 0.2, "p50": 0.5, "p80": 0.8, "max": 1.0}
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
    # Events that a model can be trained on: listens in the file, and drawn negatives.
    labelled = manifest.by_type["listen"] + (facts.negatives.drawn if facts.negatives else 0)
    return {
        **as_json(facts),
        "events": manifest.events,
        "users": facts.distinct["users"],
        "items": facts.distinct["items"],
        "labelled": labelled,
        "positive_share": manifest.by_pool["listen_plus"] / labelled if labelled else None,
        # Items without an artist or album, where the file has them.
        "items_without": {
            role: facts.distinct["items"] - int((store.catalogue_I2[:, at] != 0).sum())
            for at, role in enumerate(("artists", "albums"))
            if role in facts.distinct
        },
        "store_bytes": sum(column.bytes for column in manifest.columns.values()),
        "digest": store.digest,
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
    if facts.repeated:
        part = facts.repeated / facts.events_in_file
        rows = "row repeats" if (n := facts.repeated) == 1 else "rows repeat"
        yield f"{n:,} {rows.replace(' ', f' ({part:.1%}) ')} the user, item, time and label of another; all are kept"
    if file := facts.item_file:
        if file.without:
            yield f"{file.without:,} of {facts.distinct['items']:,} items are not in {file.source}"
        yield from (f"column {name} of {file.source} is not used: {why}" for name, why in file.left_out.items())
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
        {} if options.sequences else options.columns,
        delimiter=options.delimiter,
        header=options.header,
        recognised=options.recognised,
        sequences=options.sequences,
    )
    for role in ("user", "item"):
        require_role(source, role)
    asked, options = options, options.with_columns({role: source.names[at] for role, at in source.columns.items()})
    recognised = {role: "name" for role in options.columns if role not in asked.columns}
    if source.time_by_values:
        recognised["time"] = "values"
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
            return _build(source, options, recognised, writer, reading, sorting)
        except BaseException:
            remove_folder(writer.draft, OURS)
            raise


def _identifying(options: ImportOptions) -> dict[str, Any]:
    """The options that decide what is in a store; the folders of the files and the memory do not."""
    identifying = {name: value for name, value in to_json(options).items() if name not in ("events", "memory_mib")}
    if options.items is None:
        return identifying
    try:
        return {**identifying, "items": sha256(options.items.expanduser())}
    except OSError as error:
        what = f"the file of items cannot be read: {error.strerror}"
        raise DataError(what, where={"file": options.items}, fix="check --items") from None


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
        load_file(connection, source, reading, bad)
        item_file = ItemFile(connection, options, writer.draft / "sorting", reading) if options.items else None
        if item_file is not None:
            item_file.add_genres()
        options = convert(connection, source, options, bad)
        roles = [role for role in ID_ROLES if f"{role}_id" in column_types(connection, "events")]
        facts = _facts(connection, source, options, roles)
        facts.skipped_rows, facts.recognised = bad.skipped, recognised
        for role in roles:
            facts.originals[f"{role}s"] = number_ids(connection, role, writer.draft / f"{role}s.jsonl")
        if item_file is not None:
            facts.item_file = item_file.write(writer.draft)
        catalogue_I2 = catalogue(connection)
        negatives = _negatives(connection, options, len(catalogue_I2) - 1) if options.drawn else None
        _write_sorted(connection, writer, sorting, negatives)
        if negatives is not None:
            facts.negatives = negatives.facts
    manifest = EventManifest(name=options.name, synthetic=False, licence=LICENCE, imported=facts)
    return writer.finish(catalogue_I2, manifest)


def _facts(connection: Any, source: Source, options: ImportOptions, roles: list[str]) -> ImportFacts:
    """How many different users, items, artists and albums there are, and how the events spread over users and items."""
    count = "SELECT count(*) FROM (SELECT DISTINCT {role}_id FROM events WHERE {role}_id IS NOT NULL)"
    ids = {f"{role}s": fetch_row(connection, count.format(role=role))[0] for role in roles}
    events, positive = fetch_row(connection, "SELECT count(*), avg(positive::INT) FROM events")
    per_user = _events_per_user(connection, ids["users"])
    used = set(source.columns.values())
    order = "random order" if options.order == "random" else "order of the file"
    if options.sequences:
        order = "the order of each user's items"
    days, repeated = None, 0
    if options.time is not None:
        different = "SELECT DISTINCT user_id, item_id, seconds, positive FROM events"
        repeated = events - fetch_row(connection, f"SELECT count(*) FROM ({different})")[0]
        times = fetch_row(connection, "SELECT min(seconds), max(seconds) FROM events")
        days = Days(*(datetime.fromtimestamp(seconds, UTC).date().isoformat() for seconds in times))
    items = options.items and Path(options.items.name)
    return ImportFacts(
        options=dataclasses.replace(options, events=Path(source.path.name), items=items),
        unused_columns=[name for position, name in enumerate(source.names) if position not in used and name],
        time_order=order if days is None else "time",
        days=days,
        repeated=repeated,
        distinct=ids,
        events_in_file=events,
        positive_share_in_file=positive,
        density=events / (ids["users"] * ids["items"]),
        events_per_user=per_user,
    )


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
        item, count = (column.to_numpy() for column in batch.columns)
        counts_I[item.astype(np.int64) - 1] = count
    return Negatives(options, items, counts_I)


def _write_sorted(connection: Any, writer: StoreWriter, progress: Progress, negatives: Negatives | None) -> None:
    """Append all events by user and time; those of one second keep the order of the file."""
    total, written = fetch_row(connection, "SELECT count(*) FROM events")[0], 0
    progress(written, total)
    rows = "SELECT user_id, item_id, seconds, positive, row FROM events"
    if negatives is not None:
        rows += f" UNION ALL {FIRST_TIMES}"
    query = f"SELECT user_id, item_id, seconds, positive FROM ({rows}) ORDER BY user_id, seconds, row"
    for batch in connection.sql(query).to_arrow_reader(_BATCH_ROWS):
        poll()
        users, items, times = (batch.column(at).to_numpy() for at in range(3))
        positive = batch.column(3)
        first = positive.is_null().to_numpy(zero_copy_only=False)
        # Nothing says that a recommender was behind an event.
        liked = positive.fill_null(True).to_numpy(zero_copy_only=False)
        kinds = np.where(liked, LISTEN_PLUS | ORGANIC, SKIP | ORGANIC).astype(np.uint8)
        events = {"uids": users, "items": items, "times": times, "kinds": kinds}
        for part in (events,) if negatives is None else negatives.add(events, first):
            writer.append(**part)
        written += len(batch) - int(first.sum())
        progress(written, total)
