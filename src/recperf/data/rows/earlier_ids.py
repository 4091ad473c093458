"""The categories of two datasets of clicks matched, so that a training on one goes on with the table rows of the other.

A store with earlier ids has the rows of one store and, after its own categories, those with a table row that only an
earlier store has. Its table rows and scales are not fitted: they are the earlier ones, with further table rows.

Shapes: M categories of a column in the earlier store, L codes of a column, N rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ... import locations
from ...errors import DataError, notice_once
from ...files import link_or_copy, sha256, write_json
from ...folders import made_once
from ...jsonfile import sealed
from ..events.earlier_ids import Matched, no_times, numbers_in
from ..events.kinds import DAY_S
from ..tables import EMPTY, pyarrow
from .columns import StoredVocabulary, file_of
from .encode import EARLIER, MANIFEST, ColumnFacts, EarlierRows
from .imported import FIRST, MISSING, RARE, ImportedClicks

ROWS = "rows"
"""The role of the tensor in which the tables of all columns are stacked."""
_AT_ONCE = 1 << 18

Longs = NDArray[np.int64]


def matched(earlier: ImportedClicks, clicks: ImportedClicks, forget_days: int) -> Matched:
    """The table rows that go on."""
    added = clicks.manifest.earlier.added if clicks.manifest.earlier else [0] * len(clicks.keys)
    starts_2F = np.cumsum([(0, *earlier.table_rows), (0, *clicks.table_rows)], axis=1)
    pairs, counts = [], {}
    for at, (codes_M, kept_M) in enumerate(_codes(earlier, clicks, forget_days)):
        before_M, vocabulary = earlier.tables[at][1:-2], clicks.columns.sparse[at][1]
        rows_2N = np.stack([before_M[kept_M], clicks.tables[at][codes_M[kept_M]]])
        pairs.append(starts_2F[:, at : at + 1] + np.concatenate([[[RARE, MISSING]] * 2, rows_2N], axis=1))
        if vocabulary.values is not None:
            kept, taken = int(kept_M.sum()), int((codes_M[kept_M] <= vocabulary.size - added[at]).sum())
            counts[clicks.keys[at]] = {
                "taken": taken,
                "without_events": kept - taken,
                "new": clicks.table_rows[at] - FIRST - kept,
                "forgotten": int((before_M >= FIRST).sum()) - kept,
            }
    return Matched({ROWS: np.concatenate(pairs, axis=1)}, counts)


def with_earlier_ids(clicks: ImportedClicks, earlier: ImportedClicks, forget_days: int) -> Path:
    """A store of the same rows with the categories, table rows and scales of an earlier one, except forgotten ones;
    made once, in the cache folder."""
    _require_alike(clicks, earlier)
    _warn_of_overlap(clicks, earlier)
    identity = [clicks.digest, earlier.digest, clicks.split.record.digest, forget_days]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    folder = locations.home() / "clicks-with-earlier-ids" / digest[:32]
    notice = f"adding categories of {earlier.manifest.name} to those of {clicks.manifest.name} once, in {folder}"
    return made_once(folder, MANIFEST, notice, lambda draft: _write(draft, clicks, earlier, forget_days, digest))


def _require_alike(clicks: ImportedClicks, earlier: ImportedClicks) -> None:
    """Refuse other columns than those of the earlier store."""
    ours, theirs = ({one.name: one for one in store.manifest.columns} for store in (clicks, earlier))
    names, what = (clicks.manifest.name, earlier.manifest.name), None
    for name in {**theirs, **ours}:
        types = [_type(one[name]) if name in one else None for one in (ours, theirs)]
        if None in types:
            has, lacks = names if types[1] is None else names[::-1]
            what = f"{lacks} has no column {name!r}, which {has} has"
        elif types[0] != types[1]:
            what = f"column {name!r} is {types[0]} in {names[0]} and {types[1]} in {names[1]}"
        if what:
            break
    if what is None and list(ours) != list(theirs):
        moved = next(name for name, other in zip(ours, theirs) if name != other)
        what = f"the columns of {names[0]} are in another order than those of {names[1]}, from {moved!r} on"
    if what:
        fix = f"import a file with the same columns, with --categorical, --numeric and --hash as {names[1]} was"
        raise DataError(what, where={"folder": clicks.folder}, fix=fix)


def _type(column: ColumnFacts) -> str:
    if column.kind == "numeric":
        return "numeric"
    hashed = f", hashed to {column.buckets:,} rows" if column.buckets else ""
    return f"{column.kind} ({column.values}{hashed})"


def _warn_of_overlap(clicks: ImportedClicks, earlier: ImportedClicks) -> None:
    """Splits by time hold out rows that no earlier training had; others do so only where all rows are newer."""
    times, before, split = clicks.manifest.times, earlier.manifest.times, clicks.split.options.split
    newer = times is not None and before is not None and times[0] > before[1]
    if split == "cold" or (split == "random" and not newer):
        notice_once(
            f"split {split}: rows or users held out of {clicks.manifest.name} may have been trained on in "
            f"{earlier.manifest.name}, so that results are too good; both runs with --data.split time avoid it"
        )


def _codes(
    earlier: ImportedClicks, clicks: ImportedClicks, forget_days: int
) -> Iterator[tuple[Longs, NDArray[np.bool_]]]:
    """For each sparse column: the code here of each category of the earlier store, 0 if it has none, and which
    categories keep their table row. Those of hashed columns are never forgotten."""
    then, today = (_last_times(one) if forget_days else None for one in (earlier, clicks))
    newest = clicks.manifest.times[1] if clicks.manifest.times else 0
    for at, ((_, before), (_, now)) in enumerate(zip(earlier.columns.sparse, clicks.columns.sparse)):
        kept_M = earlier.tables[at][1:-2] >= FIRST
        if before.values is None:
            yield np.arange(1, before.size + 1), kept_M
            continue
        codes_M = numbers_in(before.keys, now.keys)
        if then and today:
            last_M = np.maximum(then[at][1:], np.where(codes_M > 0, today[at][codes_M], -1))
            kept_M = kept_M & (last_M >= newest - forget_days * DAY_S * 1_000_000)
        yield codes_M, kept_M


def _last_times(clicks: ImportedClicks) -> list[Longs]:
    """Of each sparse column the time of the last row with each code, in microseconds; -1: unknown."""
    if "times" not in clicks.arrays:
        raise no_times(clicks.manifest.name, clicks.folder)
    last = [np.full(vocabulary.size + 1, -1, np.int64) for _, vocabulary in clicks.columns.sparse]
    edges = np.cumsum((0, *clicks.slots))
    for first in range(0, clicks.rows, _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        ids_NS, times_N = clicks.arrays["ids"][part], clicks.arrays["times"][part]
        for slot in range(ids_NS.shape[1]):
            there_N = ids_NS[:, slot] != EMPTY
            at = int(np.searchsorted(edges, slot, side="right")) - 1
            np.maximum.at(last[at], ids_NS[there_N, slot], times_N[there_N])
    if clicks.manifest.earlier:
        for at, times_L in clicks.earlier_arrays("times").items():
            np.maximum(last[at], times_L, out=last[at])
    return last


def _write(draft: Path, clicks: ImportedClicks, earlier: ImportedClicks, forget_days: int, digest: str) -> None:
    for name in clicks.manifest.layout:
        link_or_copy(file_of(clicks.folder, name), file_of(draft, name))
    timed = all("times" in one.arrays for one in (clicks, earlier))
    times = _last_times(earlier) if timed else []
    arrays: dict[str, Any] = {}
    columns, added = {one.name: one for one in clicks.manifest.columns}, []
    for at, (codes_M, kept_M) in enumerate(_codes(earlier, clicks, forget_days)):
        facts, now = clicks.columns.sparse[at]
        more_M = kept_M & (codes_M == 0)
        codes_M[more_M] = now.size + 1 + np.arange(int(more_M.sum()))
        size = now.size + int(more_M.sum())
        if now.values is not None:
            columns[facts.name] = replace(facts, vocabulary=_write_vocabulary(draft, at, clicks, earlier, more_M))
        rows_L = np.full(size + 3, RARE, np.int32)
        kept = np.flatnonzero(kept_M)
        kept = kept[np.argsort(earlier.tables[at][1:-2][kept])]
        rows_L[codes_M[kept]] = FIRST + np.arange(len(kept))
        new = np.flatnonzero((clicks.tables[at][1:-2] >= FIRST) & (rows_L[1 : now.size + 1] == RARE)) + 1
        rows_L[new] = FIRST + len(kept) + np.arange(len(new))
        rows_L[0], rows_L[-1] = MISSING, EMPTY
        arrays[f"tables {at}"] = rows_L
        added.append(int(more_M.sum()))
        if timed:
            times_L = arrays[f"times {at}"] = np.full(size + 1, -1, np.int64)
            times_L[codes_M[kept]] = times[at][1:][kept]
    np.savez(draft / EARLIER, **arrays)
    scales = [(scale.mean, scale.deviation) for scale in earlier.scales]
    stated = EarlierRows(sha256=sha256(draft / EARLIER), added=added, scales=scales, indicators=earlier.indicators)
    manifest = msgspec.structs.replace(clicks.manifest, columns=[*columns.values()], digest=digest, earlier=stated)
    write_json(draft / MANIFEST, sealed(manifest))


def _write_vocabulary(
    draft: Path, at: int, clicks: ImportedClicks, earlier: ImportedClicks, more_M: NDArray[np.bool_]
) -> StoredVocabulary:
    """The categories of a column, and after them some of the earlier store's."""
    arrow, before, now = pyarrow(), earlier.columns.sparse[at][1], clicks.columns.sparse[at][1]
    more = arrow.array(more_M)
    table = arrow.table({
        name: arrow.concat_arrays([getattr(now, f"{name}s"), getattr(before, f"{name}s").filter(more)])
        for name in ("value", "key")
    })  # fmt: skip
    path = draft / f"vocabulary-{at:03d}.parquet"
    pyarrow(".parquet").write_table(table, str(path))
    return StoredVocabulary(file=path.name, entries=len(table), sha256=sha256(path))
