"""The reference's parquet files: sessions, an index of sessions by user, and the events of the test day.

Shapes: R raw rows of a chunk, E events of sessions not yet written, S sessions, U users.

One pass over the raw file writes all three. A session ends when a user pauses for more than half an hour. The last
session of a chunk waits until its end is known, and so do the session lengths of the last user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import DataError
from ....files import atomic_file, writing
from ..prepare import Split
from ..raw import Chunk, RawEvents, need_pyarrow
from ..schema import COLUMNS, SESSION_GAP_S
from ..store import EventStore
from .columns import read_block, uids_of

SESSIONS, SESSION_INDEX, TEST_EVENTS = "train_sessions.parquet", "session_index.parquet", "test_events.parquet"
PARQUET_FILES = (SESSIONS, SESSION_INDEX, TEST_EVENTS)

_GROUP_BYTES = 64
"""A row group is written once this many bytes per row of a chunk are buffered, so that groups are not too small."""

_LISTS = {
    "item_ids": "uint32",
    "timestamps": "uint32",
    "event_types": "uint8",
    "is_organic": "uint8",
    "played_ratio_pct": "uint16",
    "track_length_seconds": "uint32",
}
SCHEMAS: dict[str, dict[str, str]] = {
    SESSIONS: {"uid": "uint32", "session_id": "uint32"} | {name: f"[{kind}]" for name, kind in _LISTS.items()},
    SESSION_INDEX: {
        "uid": "uint32",
        "session_ids": "[uint32]",
        "session_lens": "[uint32]",
        "session_offsets": "[uint32]",
    },
    TEST_EVENTS: {**COLUMNS, "event_type": "uint8"},
}

Rows = dict[str, NDArray[Any]]
Write = Callable[[dict[str, Any]], None]


def write_sessions(
    events: RawEvents,
    store: EventStore,
    split: Split,
    paths: dict[str, Path],
    *,
    rows: int,
    fix: str,
    tick: Callable[[int], None],
) -> None:
    """Write the files in `paths`, which are some of the three by name. The store must hold the training events of the
    raw file."""
    with ExitStack() as opened:
        write = {
            name: opened.enter_context(_parquet(path, name, rows * _GROUP_BYTES, fix)) for name, path in paths.items()
        }
        cutter = Cutter(write.get(SESSIONS), write.get(SESSION_INDEX))
        done = 0
        for chunk in events.chunks(0, rows):
            times = chunk.times.astype(np.int64)
            train_R = (times >= split.train_start) & (times < split.train_end)
            train = _selected(chunk, train_R)
            _require_in_store(train, store, done, events.path)
            done += len(train["uid"])
            if SESSIONS in paths or SESSION_INDEX in paths:
                cutter.take(train)
            if TEST_EVENTS in paths:
                test_R = (times >= split.test_start) & (times < split.test_end)
                test_R &= known_users(chunk.uids, store.user_ids_U)
                write[TEST_EVENTS](_test_columns(_selected(chunk, test_R)))
            tick(len(chunk))
        if done != store.events:
            raise _mismatch(store, events.path, f"the file has {done:,} training events, the store {store.events:,}")
        cutter.end()


class Cutter:
    """Divides events into sessions and groups them by user; sessions that may continue in the next chunk wait."""

    def __init__(self, sessions: Write | None, index: Write | None) -> None:
        self.sessions, self.index = sessions, index
        self.pending: Rows = {}
        self.lens: Rows = {"uid": np.zeros(0, np.uint32), "len": np.zeros(0, np.int64)}
        self.last_uid, self.next_id = -1, 0

    def take(self, rows: Rows, *, final: bool = False) -> None:
        rows = (
            {name: np.concatenate([self.pending[name], column]) for name, column in rows.items()}
            if self.pending
            else rows
        )
        uids_E, times_E = rows["uid"].astype(np.int64), rows["timestamps"].astype(np.int64)
        new_E = (np.diff(uids_E, prepend=-1) != 0) | (np.diff(times_E, prepend=0) > SESSION_GAP_S)
        edges = np.append(np.flatnonzero(new_E), len(uids_E))
        complete = max(0, len(edges) - 1 - (not final))
        edges = edges[: complete + 1]
        self.pending = {name: column[edges[-1] :] for name, column in rows.items()}
        if complete:
            uids_S = rows["uid"][edges[:-1]]
            if self.sessions:
                self.sessions(_session_columns(rows, edges, uids_S, self._ids(uids_S)))
            self._index_sessions(uids_S, np.diff(edges), final)

    def end(self) -> None:
        """Write the pending session: no events follow."""
        if self.pending:
            pending, self.pending = self.pending, {}
            self.take(pending, final=True)

    def _ids(self, uids_S: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Numbers of the sessions of each user, from 0; the first user may already have some."""
        first_S = _group_starts(uids_S)
        ids_S = np.arange(len(uids_S)) - np.repeat(first_S, np.diff(np.append(first_S, len(uids_S))))
        if uids_S[0] == self.last_uid:
            ids_S[uids_S == uids_S[0]] += self.next_id
        self.last_uid, self.next_id = int(uids_S[-1]), int(ids_S[-1]) + 1
        return ids_S

    def _index_sessions(self, uids_S: NDArray[np.uint32], lens_S: NDArray[np.int64], final: bool) -> None:
        if not self.index:
            return
        uids_S, lens_S = np.concatenate([self.lens["uid"], uids_S]), np.concatenate([self.lens["len"], lens_S])
        starts_U = _group_starts(uids_S)
        stop = len(uids_S) if final else int(starts_U[-1])
        self.lens = {"uid": uids_S[stop:], "len": lens_S[stop:]}
        edges = np.append(starts_U[starts_U < stop], stop)
        if stop:
            self.index(_index_columns(uids_S[:stop], lens_S[:stop], edges))


def _session_columns(rows: Rows, edges: NDArray[np.int64], uids_S: Any, ids_S: Any) -> dict[str, Any]:
    part = slice(0, int(edges[-1]))
    lists = {
        name: (edges, rows[name][part], rows[f"{name}_null"][part] if f"{name}_null" in rows else None)
        for name in _LISTS
    }
    return {"uid": uids_S, "session_id": ids_S, **lists}


def _index_columns(uids_S: Any, lens_S: NDArray[np.int64], edges: NDArray[np.int64]) -> dict[str, Any]:
    sessions_U = np.diff(edges)
    before_S = np.repeat((np.cumsum(lens_S) - lens_S)[edges[:-1]], sessions_U)
    ids_S = np.arange(len(lens_S)) - np.repeat(edges[:-1], sessions_U)
    return {
        "uid": uids_S[edges[:-1]],
        "session_ids": (edges, ids_S, None),
        "session_lens": (edges, lens_S, None),
        "session_offsets": (edges, np.cumsum(lens_S) - before_S, None),
    }


def _test_columns(rows: Rows) -> dict[str, Any]:
    names = {"timestamp": "timestamps", "item_id": "item_ids", "event_type": "event_types"}
    columns: dict[str, Any] = {name: rows[names.get(name, name)] for name in COLUMNS}
    return columns | {name: (None, rows[name], rows[f"{name}_null"]) for name in COLUMNS if f"{name}_null" in rows}


def _selected(chunk: Chunk, which_R: NDArray[np.bool_]) -> Rows:
    columns: Rows = {
        "uid": chunk.uids,
        "item_ids": chunk.items,
        "timestamps": chunk.times,
        "event_types": chunk.types,
        "is_organic": chunk.organic,
        "played_ratio_pct": chunk.ratios,
        "played_ratio_pct_null": chunk.ratio_null,
        "track_length_seconds": chunk.lengths,
        "track_length_seconds_null": chunk.length_null,
    }
    return {name: column[which_R] for name, column in columns.items()}


def _group_starts(values: NDArray[Any]) -> NDArray[np.int64]:
    return np.flatnonzero(np.diff(values.astype(np.int64), prepend=-1))


def known_users(uids_R: NDArray[np.uint32], user_ids_U: NDArray[np.int64]) -> NDArray[np.bool_]:
    place_R = np.minimum(np.searchsorted(user_ids_U, uids_R), len(user_ids_U) - 1)
    return np.asarray(user_ids_U[place_R] == uids_R)


def _require_in_store(rows: Rows, store: EventStore, start: int, path: Path) -> None:
    """Require the same events in the raw file (for the sessions) and in the store (for the cache)."""
    stop = start + len(rows["uid"])
    same = stop <= store.events and (
        np.array_equal(uids_of(store, start, stop), rows["uid"])
        and np.array_equal(read_block(store, "items", start, stop), rows["item_ids"])
        and np.array_equal(read_block(store, "times", start, stop), rows["timestamps"])
    )
    if not same:
        raise _mismatch(store, path, f"they differ between events {start:,} and {stop:,}")


def _mismatch(store: EventStore, path: Path, how: str) -> DataError:
    return DataError(
        f"the store was not prepared from this file: {how}",
        where={"store": store.folder, "file": path},
        fix="prepare the file again, into a new store",
    )


@contextmanager
def _parquet(path: Path, name: str, group_bytes: int, fix: str) -> Iterator[Write]:
    """Write a parquet file: yields a function that appends columns, each its values or, for lists, (offsets, values,
    null mask)."""
    arrow = need_pyarrow()
    values = {column: getattr(arrow, kind.strip("[]"))() for column, kind in SCHEMAS[name].items()}
    schema = arrow.schema(
        (column, arrow.large_list(arrow.field("element", values[column])) if kind[0] == "[" else values[column])
        for column, kind in SCHEMAS[name].items()
    )

    def built(field: Any, content: Any) -> Any:
        edges, flat, null = content if isinstance(content, tuple) else (None, content, None)
        flat = arrow.array(flat.astype(str(values[field.name])), mask=null)
        return flat if edges is None else arrow.LargeListArray.from_arrays(edges, flat, type=field.type)

    waiting: list[Any] = []

    def flush() -> None:
        if waiting:
            table = arrow.Table.from_batches(waiting)
            # Without this, the error of a full disk would name whichever file is closed first.
            with writing(path, fix=fix):
                writer.write_table(table, row_group_size=len(table))
            waiting.clear()

    def write(columns: dict[str, Any]) -> None:
        batch = arrow.record_batch([built(field, columns[field.name]) for field in schema], schema=schema)
        if len(batch):
            waiting.append(batch)
        if sum(batch.nbytes for batch in waiting) >= group_bytes:
            flush()

    with atomic_file(path, fix=fix) as file, arrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        yield write
        flush()
