"""What the reference writes as parquet: sessions, an index of them by user, and the events of the test day.

Shapes: R raw rows of a piece, E events of sessions not yet written, S sessions, U users.

One pass over the raw file writes all three. A session is cut where a user rests for more than half
an hour; the one a piece ends in is held back until its end is known, and so are the session lengths of the last user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import DataError
from ....files import writing
from ..prepare import Split
from ..raw import Chunk, RawEvents, need_pyarrow
from ..schema import COLUMNS, SESSION_GAP_S
from ..store import EventStore
from .flat_cache import read_block, uids_of
from .npy import drafted

SESSIONS, SESSION_INDEX, TEST_EVENTS = "train_sessions.parquet", "session_index.parquet", "test_events.parquet"
PARQUET_FILES = (SESSIONS, SESSION_INDEX, TEST_EVENTS)

_GROUP_BYTES = 64
"""A row group is written when this many bytes a row of a piece wait for it, so that few events do not make a group."""

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
    wanted: dict[str, Path],
    *,
    rows: int,
    fix: str,
    tick: Callable[[int], None],
) -> dict[str, list[str]]:
    """Write those of the three files that are wanted, by name, and answer with their digests. The store must hold the
    training events of the file."""
    digests: dict[str, list[str]] = {}
    with ExitStack() as opened:
        write = {
            name: opened.enter_context(_parquet(path, name, rows * _GROUP_BYTES, fix, digests))
            for name, path in wanted.items()
        }
        cutter = Cutter(write.get(SESSIONS), write.get(SESSION_INDEX))
        done = 0
        for chunk in events.chunks(0, rows):
            times = chunk.times.astype(np.int64)
            train_R = (times >= split.train_start) & (times < split.train_end)
            train = _picked(chunk, train_R)
            _must_be_in_store(train, store, done, events.path)
            done += len(train["uid"])
            if SESSIONS in wanted or SESSION_INDEX in wanted:
                cutter.take(train)
            if TEST_EVENTS in wanted:
                test_R = (times >= split.test_start) & (times < split.test_end)
                test_R &= known_users(chunk.uids, store.user_ids_U)
                write[TEST_EVENTS](_test_columns(_picked(chunk, test_R)))
            tick(len(chunk))
        if done != store.events:
            raise _foreign(store, events.path, f"the file has {done:,} training events, the store {store.events:,}")
        cutter.end()
    return digests


class Cutter:
    """Cuts events into sessions and gathers them by user, holding back what may go on in the next piece."""

    def __init__(self, sessions: Write | None, index: Write | None) -> None:
        self.sessions, self.index = sessions, index
        self.held: Rows = {}
        self.lens: Rows = {"uid": np.zeros(0, np.uint32), "len": np.zeros(0, np.int64)}
        self.last_uid, self.next_id = -1, 0

    def take(self, rows: Rows, *, final: bool = False) -> None:
        rows = {name: np.concatenate([self.held[name], column]) for name, column in rows.items()} if self.held else rows
        uids_E, times_E = rows["uid"].astype(np.int64), rows["timestamps"].astype(np.int64)
        new_E = (np.diff(uids_E, prepend=-1) != 0) | (np.diff(times_E, prepend=0) > SESSION_GAP_S)
        edges = np.append(np.flatnonzero(new_E), len(uids_E))
        kept = max(0, len(edges) - 1 - (not final))
        edges = edges[: kept + 1]
        self.held = {name: column[edges[-1] :] for name, column in rows.items()}
        if kept:
            uids_S = rows["uid"][edges[:-1]]
            if self.sessions:
                self.sessions(_session_columns(rows, edges, uids_S, self._ids(uids_S)))
            self._gather(uids_S, np.diff(edges), final)

    def end(self) -> None:
        """Nothing follows: what was held back is whole."""
        if self.held:
            held, self.held = self.held, {}
            self.take(held, final=True)

    def _ids(self, uids_S: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Numbers of sessions, from 0 for each user; the first user may have had some before."""
        first_S = _group_starts(uids_S)
        ids_S = np.arange(len(uids_S)) - np.repeat(first_S, np.diff(np.append(first_S, len(uids_S))))
        if uids_S[0] == self.last_uid:
            ids_S[uids_S == uids_S[0]] += self.next_id
        self.last_uid, self.next_id = int(uids_S[-1]), int(ids_S[-1]) + 1
        return ids_S

    def _gather(self, uids_S: NDArray[np.uint32], lens_S: NDArray[np.int64], final: bool) -> None:
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


def _picked(chunk: Chunk, which_R: NDArray[np.bool_]) -> Rows:
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


def _must_be_in_store(rows: Rows, store: EventStore, start: int, path: Path) -> None:
    """Sessions come from the raw file and the cache from the store: they must be the same events."""
    stop = start + len(rows["uid"])
    same = stop <= store.events and (
        np.array_equal(uids_of(store, start, stop), rows["uid"])
        and np.array_equal(read_block(store, "items", start, stop), rows["item_ids"])
        and np.array_equal(read_block(store, "times", start, stop), rows["timestamps"])
    )
    if not same:
        raise _foreign(store, path, f"they differ between events {start:,} and {stop:,}")


def _foreign(store: EventStore, path: Path, how: str) -> DataError:
    return DataError(
        f"the store was not prepared from this file: {how}",
        where={"store": store.folder, "file": path},
        fix="prepare the file again, into a new store",
    )


@contextmanager
def _parquet(path: Path, name: str, group_bytes: int, fix: str, digests: dict[str, list[str]]) -> Iterator[Write]:
    """A function that appends columns. A column is its values, or for lists their edges, values and which are null.

    The file's digests are put into `digests` at the end.
    """
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
            # Here, because further out a full disk would be blamed on whichever of the files is closed first.
            with writing(path, fix=fix):
                writer.write_table(table, row_group_size=len(table))
            waiting.clear()

    def write(columns: dict[str, Any]) -> None:
        batch = arrow.record_batch([built(field, columns[field.name]) for field in schema], schema=schema)
        if len(batch):
            waiting.append(batch)
        if sum(batch.nbytes for batch in waiting) >= group_bytes:
            flush()

    with drafted(path, fix=fix) as file, arrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        yield write
        flush()
    digests[name] = file.blocks()
