"""The ids of two event stores matched, so that a training on one goes on with the rows of the other.

Every import numbers its ids 1, 2, 3 ... anew. A store with earlier ids has the events of one store and, after its own
ids, those that only an earlier store has: its numbers are rows for the ids of both.

Shapes: N ids in both stores, M ids in the earlier one, I items, K ids that were added.
"""

from __future__ import annotations

import hashlib
import json
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
from .item_features import FILE, item_values
from .kinds import DAY_S, DRAWN
from .manifest import EarlierIds, ImportFacts
from .store import CATALOGUE, COLUMNS, MANIFEST, EventStore, content_digest, file_of, originals, stored_column

ROLES = ("users", "items", "artists", "albums")
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


def matched(earlier: EventStore, store: EventStore, forget_days: int) -> Matched:
    """The ids of each role whose rows go on; 0 is in both."""
    facts, rows, counts = _require(store), {}, {}
    for role, (numbers_M, stale_M) in _numbers(earlier, store, forget_days).items():
        going_on = np.flatnonzero((numbers_M > 0) & ~stale_M)
        lines = len(_listed(store, role))
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
    numbers.pop(FEATURES)
    added = {role: np.flatnonzero((numbers_M == 0) & ~stale_M) + 1 for role, (numbers_M, stale_M) in numbers.items()}
    if not any(map(len, added.values())):
        return store.folder
    identity = [_identity(store), _identity(earlier), forget_days]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    folder = locations.home() / "events-with-earlier-ids" / name
    notice = f"adding ids of {earlier.name} to those of {store.name} once, in {folder}"
    first = {role: numbers_M for role, (numbers_M, _) in numbers.items()}
    return made_once(folder, MANIFEST, notice, lambda draft: _write(draft, store, earlier, added, first))


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
        path = store.folder / TIMES
        if not path.is_file() or sha256(path) != facts.earlier.sha256:
            raise DataError(
                f"the event store is damaged: {TIMES} is not the file that was written", where={"file": path}
            )
        users_K, items_K = np.split(np.load(path), [facts.earlier.ids["users"]])
        for role, times_K in (("users", users_K), ("items", items_K)):
            times[role][len(times[role]) - len(times_K) :] = times_K
    for column, role in enumerate(("artists", "albums")):
        if role in times:
            np.maximum.at(times[role], store.catalogue_I2[:, column], times["items"])
            times[role][0] = -1
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
    roles = [role for role in ROLES if role in facts.originals and role in before.originals]
    for role in roles:
        kinds = facts.originals[role].kind, before.originals[role].kind
        if kinds[0] != kinds[1]:
            what = f"the ids of {role} have kind {kinds[0]} in {store.name} and kind {kinds[1]} in {earlier.name}"
            raise DataError(what, where={"store": store.folder}, fix="import both alike")
    numbers = {role: numbers_in(*(_listed(one, role) for one in (earlier, store))) for role in (*roles, FEATURES)}
    parts = {role: (numbers_M, np.zeros(len(numbers_M), np.bool_)) for role, numbers_M in numbers.items()}
    if not forget_days:
        return parts
    for one in (store, earlier):
        if one.time_order != "time":
            raise no_times(one.name, one.folder)
    now, then, today = store.manifest.last_time, last_times(earlier), last_times(store)
    for role in roles:
        numbers_M = numbers[role]
        last_M = np.maximum(then[role][1:], np.where(numbers_M > 0, today[role][numbers_M], -1))
        parts[role] = numbers_M, last_M < now - forget_days * DAY_S
    return parts


def no_times(name: str, folder: Path) -> DataError:
    what = f"{name} has no times, so that nothing in it can be forgotten by time"
    return DataError(what, where={"store": folder}, fix="leave out --start.forget-days")


def _listed(store: EventStore, role: str) -> Any:
    if role == FEATURES:
        values = item_values(store)
        return pyarrow().array(values.names if values else [], pyarrow().string())
    return pyarrow().array(originals(store.folder, role))


def numbers_in(ids: Any, among: Any) -> Longs:
    """The number of each id in a list, from 1 on; 0 for one that is not there."""
    at = pyarrow(".compute").index_in(ids, value_set=among).fill_null(-1)
    return np.asarray(at.to_numpy(zero_copy_only=False), np.int64) + 1


def _identity(store: EventStore) -> Any:
    facts = _require(store)
    items = facts.item_file.sha256 if facts.item_file else None
    return [store.digest, {role: one.sha256 for role, one in facts.originals.items()}, items]


def _write(
    draft: Path, store: EventStore, earlier: EventStore, added: dict[str, Longs], numbers: dict[str, Longs]
) -> None:
    manifest = msgspec.structs.replace(store.manifest, columns=dict(store.manifest.columns))
    facts = manifest.imported = msgspec.structs.replace(_require(store), originals=dict(store.originals))
    for name in COLUMNS:
        if name != CATALOGUE:
            link_or_copy(file_of(store.folder, name), file_of(draft, name))
    for role, stated in facts.originals.items():
        lines = (store.folder / stated.file).read_bytes()
        if len(added.get(role, ())):
            more = (earlier.folder / f"{role}.jsonl").read_bytes().split(b"\n")
            lines += b"".join(more[number - 1] + b"\n" for number in added[role].tolist())
        write_atomic(draft / stated.file, lines)
        facts.originals[role] = msgspec.structs.replace(
            stated, lines=stated.lines + len(added.get(role, ())), sha256=hashlib.sha256(lines).hexdigest()
        )
    groups_K2 = np.zeros((len(added["items"]), 2), np.uint32)
    for column, role in enumerate(("artists", "albums")):
        if role in numbers:
            new_M = numbers[role].copy()
            new_M[added[role] - 1] = store.originals[role].lines + 1 + np.arange(len(added[role]))
            groups_K2[:, column] = np.append(0, new_M)[earlier.catalogue_I2[added["items"], column]]
    catalogue_I2 = np.concatenate([store.catalogue_I2, groups_K2]).astype(COLUMNS[CATALOGUE])
    write_atomic(file_of(draft, CATALOGUE), catalogue_I2.tobytes())
    manifest.columns[CATALOGUE], manifest.items = stored_column(draft, CATALOGUE), len(catalogue_I2)
    manifest.digest = content_digest(manifest.columns)
    _write_items(draft, store, earlier, added["items"], facts)
    times = last_times(earlier)
    np.save(draft / TIMES, np.concatenate([times[role][added[role]] for role in ("users", "items")]))
    ids = {role: len(added.get(role, ())) for role in ROLES}
    facts.earlier = EarlierIds(ids=ids, sha256=sha256(draft / TIMES))
    write_json(draft / MANIFEST, sealed(manifest.content()))


def _write_items(draft: Path, store: EventStore, earlier: EventStore, added_K: Longs, facts: ImportFacts) -> None:
    """The titles and features of items, with those that the earlier store has of the added ones."""
    stated, before = facts.item_file, _require(earlier).item_file
    if stated is None:
        return
    arrow, compute, parquet = pyarrow(), pyarrow(".compute"), pyarrow(".parquet")
    table = parquet.read_table(str(store.folder / FILE))
    if before is not None:
        rows = parquet.read_table(str(earlier.folder / FILE))
        place = compute.index_in(rows["item"], value_set=arrow.array(added_K))
        rows, place = rows.filter(compute.is_valid(place)), place.drop_null()
        none = arrow.array([[]] * len(rows), arrow.list_(arrow.string()))
        features = [
            rows[f"feature {before.features.index(name)}"] if name in before.features else none
            for name in stated.features
        ]
        items = compute.add(compute.cast(place, arrow.int64()), store.items)
        more = arrow.table([items, rows["title"], *features], names=table.column_names)
        table = arrow.concat_tables([table, more.cast(table.schema)])
    parquet.write_table(table, str(draft / FILE))
    facts.item_file = msgspec.structs.replace(stated, sha256=sha256(draft / FILE), items=len(table))
