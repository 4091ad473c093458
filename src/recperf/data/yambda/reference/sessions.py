"""The reference's parquet files: sessions, an index of sessions by user, and the events of the test day.

Shapes: R raw rows of a chunk, E events of sessions not yet written, S sessions, U users.

One pass over the raw file writes all three. A session ends when a user pauses for more than half an hour. Sessions are
cut from the events of whole users: those of the last user of a chunk wait for the next chunk.
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
from ..raw import Chunk, RawEvents, need_pyarrow
from ..schema import COLUMNS, SESSION_GAP_S, Split
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
        done, waiting = 0, dict[str, NDArray[Any]]()

        def write_users(rows: Rows) -> None:
            sessions = session_columns(rows)
            if SESSIONS in write:
                write[SESSIONS](sessions)
            if SESSION_INDEX in write:
                write[SESSION_INDEX](index_columns(sessions))

        for chunk in events.chunks(0, rows):
            times = chunk.times.astype(np.int64)
            train = _selected(chunk, (times >= split.train_start) & (times < split.train_end))
            _require_in_store(train, store, done, events.path)
            done += len(train["uid"])
            if waiting:
                train = {name: np.concatenate([waiting[name], column]) for name, column in train.items()}
            last_user = _group_starts(train["uid"])[-1:].sum()
            write_users({name: column[:last_user] for name, column in train.items()})
            waiting = {name: column[last_user:] for name, column in train.items()}
            if TEST_EVENTS in write:
                test_R = (times >= split.test_start) & (times < split.test_end)
                test_R &= known_users(chunk.uids, store.user_ids_U)
                write[TEST_EVENTS](_test_columns(_selected(chunk, test_R)))
            tick(len(chunk))
        write_users(waiting)
        if done != store.events:
            raise _mismatch(store, events.path, f"the file has {done:,} training events, the store {store.events:,}")


def session_columns(rows: Rows) -> dict[str, Any]:
    """The sessions of some users, from all of their events; a list is (offsets, values, null mask)."""
    uids_E, times_E = rows["uid"].astype(np.int64), rows["timestamps"].astype(np.int64)
    new_E = (np.diff(uids_E, prepend=-1) != 0) | (np.diff(times_E, prepend=0) > SESSION_GAP_S)
    edges = np.append(np.flatnonzero(new_E), len(uids_E))
    uids_S = rows["uid"][edges[:-1]]
    lists = {name: (edges, rows[name], rows.get(f"{name}_null")) for name in _LISTS}
    return {"uid": uids_S, "session_id": _numbers(uids_S), **lists}


def index_columns(sessions: dict[str, Any]) -> dict[str, Any]:
    """The index by user of the sessions of whole users."""
    uids_S, lens_S = sessions["uid"], np.diff(sessions["item_ids"][0])
    edges = np.append(_group_starts(uids_S), len(uids_S))
    before_S = np.repeat((np.cumsum(lens_S) - lens_S)[edges[:-1]], np.diff(edges))
    return {
        "uid": uids_S[edges[:-1]],
        "session_ids": (edges, sessions["session_id"], None),
        "session_lens": (edges, lens_S, None),
        "session_offsets": (edges, np.cumsum(lens_S) - before_S, None),
    }


def _numbers(uids_S: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Numbers of the sessions of each user, from 0."""
    first_U = _group_starts(uids_S)
    return np.arange(len(uids_S)) - np.repeat(first_U, np.diff(first_U, append=len(uids_S)))


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
