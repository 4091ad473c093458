"""The ids of two event stores matched, so that a training on one goes on with the rows of the other.

Every import numbers its ids 1, 2, 3 ... anew. A store with earlier ids has the events of one store and, after its own
ids, those that only an earlier store has: its numbers are rows for the ids of both.

Shapes: N ids in both stores, M ids in the earlier one, I items, K ids that were added.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ... import locations
from ...errors import DataError
from ...files import link_or_copy, sha256, write_atomic, write_json
from ...folders import made_once
from ...jsonfile import sealed
from ..tables import pyarrow
from .item_table import item_values, require_file
from .kinds import DAY_S, DRAWN
from .manifest import EarlierIds, ImportFacts, SideTableFacts
from .options import SideRole
from .store import CONTEXT, MANIFEST, EventStore, content_digest, file_of, originals, stored_columns

ROLES = ("users", "items")
FEATURES = "features"
"""Stands for the values of items' features, which are matched like ids and never forgotten."""
TIMES = "earlier_times.npy"
_AT_ONCE = 1 << 22

Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Matched:
    """The rows of an earlier dataset that go on in one with that dataset's ids."""

    rows: dict[str, Longs]
    """By role, the number of each row in the earlier dataset, and in the other."""
    counts: dict[str, dict[str, int]]
    """By kind of id, how many are taken over, taken over without events here, new, and forgotten."""


Lists = Callable[[EventStore], Mapping[str, Sequence[str]]]
"""Values of items by further roles, which are matched like those of features."""


def _features(store: EventStore) -> dict[str, list[str]]:
    values = item_values(store)
    return {FEATURES: values.names if values else []}


def matched(earlier: EventStore, store: EventStore, forget_days: int, lists: Lists = _features) -> Matched:
    """The ids of each role whose rows go on; 0 is in both."""
    facts, rows, counts = _require(store), {}, {}
    values = {role: [_text(of[role]) for of in (lists(earlier), lists(store))] for role in lists(store)}
    numbers = _numbers(earlier, store, forget_days)
    numbers |= {role: (numbers_in(*both), np.zeros(len(both[0]), np.bool_)) for role, both in values.items()}
    for role, (numbers_M, stale_M) in numbers.items():
        going_on = np.flatnonzero((numbers_M > 0) & ~stale_M)
        lines = len(values[role][1]) if role in values else store.originals[role].lines
        added = facts.earlier.ids.get(role, 0) if facts.earlier else 0
        without_events = int((numbers_M[going_on] > lines - added).sum())
        new, forgotten = lines - len(going_on), int(stale_M.sum())
        taken = len(going_on) - without_events
        counts[role] = {"taken": taken, "without_events": without_events, "new": new, "forgotten": forgotten}
        rows[role] = np.stack([np.append(0, going_on + 1), np.append(0, numbers_M[going_on])])
    return Matched(rows, counts)


def with_earlier_ids(store: EventStore, earlier: EventStore, forget_days: int) -> Path:
    """A store of the same events with the ids of an earlier store appended, except forgotten ones; made once, in the
    cache folder. If nothing is to be added it is the store itself."""
    numbers = _numbers(earlier, store, forget_days)
    added = {role: np.flatnonzero((numbers_M == 0) & ~stale_M) + 1 for role, (numbers_M, stale_M) in numbers.items()}
    if not any(map(len, added.values())) and _ranges(store) == _ranges(earlier):
        return store.folder
    identity = [store.digest, earlier.digest, forget_days]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    folder = locations.home() / "events-with-earlier-ids" / name
    notice = f"adding ids of {earlier.name} to those of {store.name} once, in {folder}"
    return made_once(folder, MANIFEST, notice, lambda draft: _write(draft, store, earlier, added))


def _ranges(store: EventStore) -> dict[str, list[float]]:
    """Where the ranges of the numbers of items end."""
    facts = _require(store).tables.get("item")
    return {column.name: column.edges for column in facts.columns if column.edges} if facts else {}


def last_times(store: EventStore) -> dict[str, Longs]:
    """The time of the last event of every id of each role, by number; -1: unknown, as that of number 0."""
    facts = _require(store)
    times = {role: np.full(facts.originals[role].lines + 1, -1, np.int64) for role in facts.originals}
    items_I = np.full(store.items, -1, np.int64)
    for first in range(0, store.events, _AT_ONCE):
        part = slice(first, min(first + _AT_ONCE, store.events))
        happened = (store.kinds(part) & DRAWN) == 0
        np.maximum.at(items_I, store.items_at(part)[happened], store.times_E[part][happened].astype(np.int64))
    times["items"] = items_I
    times["users"][store.user_ids_U] = store.times_E[store.user_first_U1[1:] - 1]
    if facts.earlier:
        path = require_file(store, TIMES, facts.earlier.sha256)
        users_K, items_K = np.split(np.load(path), [facts.earlier.ids["users"]])
        for role, times_K in (("users", users_K), ("items", items_K)):
            times[role][len(times[role]) - len(times_K) :] = times_K
    return times


def _require(store: EventStore) -> ImportFacts:
    """Refuse a store without lists of own ids."""
    if store.imported is None or not {"users", "items"} <= set(store.originals):
        raise DataError(
            f"{store.name} has no list of own ids, by which rows are matched",
            where={"store": store.folder},
            fix="recperf data import gives every store one",
        )
    return store.imported


def _numbers(earlier: EventStore, store: EventStore, forget_days: int) -> dict[str, tuple[Longs, NDArray[np.bool_]]]:
    """For each id of an earlier store its number in the other, 0 if it has none, and whether it is to be forgotten."""
    facts, before = _require(store), _require(earlier)
    for role in ROLES:
        kinds = facts.originals[role].kind, before.originals[role].kind
        if kinds[0] != kinds[1]:
            what = f"the ids of {role} have kind {kinds[0]} in {store.name} and kind {kinds[1]} in {earlier.name}"
            raise DataError(what, where={"store": store.folder}, fix="import both alike")
    ids = {role: [pyarrow().array(originals(one.folder, role)) for one in (earlier, store)] for role in ROLES}
    numbers = {role: numbers_in(*both) for role, both in ids.items()}
    parts = {role: (numbers_M, np.zeros(len(numbers_M), np.bool_)) for role, numbers_M in numbers.items()}
    if not forget_days:
        return parts
    for one in (store, earlier):
        if one.time_order != "time":
            raise no_times(one.name, one.folder)
    now, then, today = store.manifest.last_time, last_times(earlier), last_times(store)
    for role in ROLES:
        numbers_M = numbers[role]
        last_M = np.maximum(then[role][1:], np.where(numbers_M > 0, today[role][numbers_M], -1))
        parts[role] = numbers_M, last_M < now - forget_days * DAY_S
    return parts


def no_times(name: str, folder: Path) -> DataError:
    what = f"{name} has no times, so that nothing in it can be forgotten by time"
    return DataError(what, where={"store": folder}, fix="leave out --start.forget-days")


def _text(values: Sequence[str]) -> Any:
    return pyarrow().array(values, pyarrow().string())


def numbers_in(ids: Any, among: Any) -> Longs:
    """The number of each id in a list, from 1 on; 0 for one that is not there."""
    at = pyarrow(".compute").index_in(ids, value_set=among).fill_null(-1)
    return np.asarray(at.to_numpy(zero_copy_only=False), np.int64) + 1


def _write(draft: Path, store: EventStore, earlier: EventStore, added: dict[str, Longs]) -> None:
    manifest = msgspec.structs.replace(store.manifest)
    facts = manifest.imported = msgspec.structs.replace(_require(store), originals=dict(store.originals))
    for name in stored_columns(manifest.groups):
        link_or_copy(file_of(store.folder, name), file_of(draft, name))
    if facts.context and facts.context.columns:
        link_or_copy(store.folder / CONTEXT, draft / CONTEXT)
    for role, stated in facts.originals.items():
        lines = (store.folder / stated.file).read_bytes()
        if len(added[role]):
            more = (earlier.folder / f"{role}.jsonl").read_bytes().split(b"\n")
            lines += b"".join(more[number - 1] + b"\n" for number in added[role].tolist())
        write_atomic(draft / stated.file, lines)
        facts.originals[role] = msgspec.structs.replace(
            stated, lines=stated.lines + len(added[role]), sha256=hashlib.sha256(lines).hexdigest()
        )
    manifest.items += len(added["items"])
    first = {"item": store.items, "user": store.originals["users"].lines + 1}
    facts.tables = {
        role: _write_table(draft, store, earlier, role, added[f"{role}s"], first[role]) for role in facts.tables
    }
    times = last_times(earlier)
    np.save(draft / TIMES, np.concatenate([times[role][added[role]] for role in ROLES]))
    facts.earlier = EarlierIds(ids={role: len(added[role]) for role in ROLES}, sha256=sha256(draft / TIMES))
    manifest.digest = content_digest(manifest)
    write_json(draft / MANIFEST, sealed(manifest.content()))


def _write_table(
    draft: Path, store: EventStore, earlier: EventStore, role: SideRole, added_K: Longs, first: int
) -> SideTableFacts:
    """The table of items or users with the rows that the earlier store has of the added ones, whose numbers begin with
    `first`. Numbers have the ranges of the earlier store."""
    stated, before = _require(store).tables[role], _require(earlier).tables.get(role)
    arrow, compute, parquet = pyarrow(), pyarrow(".compute"), pyarrow(".parquet")
    file, columns = f"{role}s.parquet", list(stated.columns)
    table = parquet.read_table(str(store.folder / file))
    if before is not None:
        known = {(one.name, one.kind): (f"v{at}", one) for at, one in enumerate(before.columns)}
        rows = parquet.read_table(str(earlier.folder / file))
        place = compute.index_in(rows["number"], value_set=arrow.array(added_K))
        rows, place = rows.filter(compute.is_valid(place)), place.drop_null()
        more = {"number": compute.add(compute.cast(place, arrow.int64()), first)}
        for at, one in enumerate(columns):
            column, same = known.get((one.name, one.kind), (None, one))
            columns[at] = msgspec.structs.replace(one, edges=same.edges)
            more[f"v{at}"] = rows[column] if column else arrow.nulls(len(rows), table.schema.field(f"v{at}").type)
        if stated.title:
            more["title"] = rows["title"] if before.title else arrow.nulls(len(rows), arrow.string())
        table = arrow.concat_tables([table, arrow.table(more).cast(table.schema)])
    parquet.write_table(table, str(draft / file))
    return msgspec.structs.replace(stated, sha256=sha256(draft / file), rows=len(table), columns=columns)
