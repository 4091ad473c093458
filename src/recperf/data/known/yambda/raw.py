"""Raw Yambda: finds its files, checks every value, and writes the training events as an event store.

Preparing is one pass over the file, in bounded memory: the parquet reader streams pages through small buffers. The
split by time needs the last timestamp, for which the times alone are read first. The bookmark holds all state of the
pass, so that it can resume after any interruption.

Shapes: I items of the catalogue.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .... import units
from ....errors import DataError, MachineError
from ....files import open_dataset_file, sha256
from ....jsonfile import Struct, require
from ...events.kinds import MOST_ID
from ...events.manifest import EventManifest
from ...events.store import EVENT_BYTES
from ...events.writer import JOURNAL, StoreWriter, finished
from ...tables import one_array, pyarrow
from .rows import EVENT_TYPES, EventRows
from .schema import (
    ALBUMS_FILE,
    ARTISTS_FILE,
    COLUMNS,
    EVENTS_FILE,
    GAP_MINUTES,
    IDS,
    ITEM_GROUPS,
    LICENCE,
    TEST_DAYS,
    TRAIN_DAYS,
    Split,
    split_of,
)

READ_AHEAD = 1 << 20
"""Bytes buffered per column."""
CHUNK_ROWS = 1 << 20
"""Rows read at a time, about 220 bytes each; more are not faster."""
AGAIN = "get the file again: recperf data get --help"
SPARSE, SPARE_ITEMS = 4, 1 << 20
"""Items must be below `SPARSE` times the rows of the longer map, plus `SPARE_ITEMS`. Yambda's maps have a row for every
id. A damaged id is usually much larger, and a catalogue of that length would use all memory."""
_MOST = dict.fromkeys(IDS, MOST_ID) | {"is_organic": 1}
"""The largest value of a column whose type allows more."""
COMMIT_ROWS = 1 << 24
"""Rows between two commits: the most work that a killed process loses."""
ROOM_SHARE = 0.9
"""A disk with less than this share of the space that the events may need is refused at the start."""
LEFT_OUT = ("test_events", "test_events_of_unknown_users", "dropped_before", "dropped_gap", "dropped_last")
_FIELDS = {"uid": "uids", "item_id": "items", "timestamp": "times", "event_type": "types"}
_FIELDS |= {"played_ratio_pct": "ratios", "is_organic": "organic"}
"""The columns that are read, and their names in `EventRows`."""


@dataclass(frozen=True, kw_only=True)
class RawFiles:
    """The three files of a raw dataset."""

    events: Path
    artists: Path
    albums: Path
    size: str


def locate(root: Path, size: str | None = None) -> RawFiles:
    """Find the raw files in a folder: events in `flat/<size>/` (as on the hub), in `raw/<size>/`, or in the folder."""
    root = root.expanduser()
    patterns = [f"{part}/{size or '*'}/{EVENTS_FILE}" for part in ("flat", "raw")] + [EVENTS_FILE]
    files = next(filter(None, (sorted(root.glob(pattern)) for pattern in patterns)), [])
    if len(files) != 1:
        raise DataError(
            f"there are {len(files)} files {EVENTS_FILE} of this dataset here, not one",
            where={"folder": root, "looked for": ", ".join(patterns)},
            fix="name another folder with --path, or another dataset; recperf data get --help",
        )
    events = files[0]
    roots = [root, events.parent]
    artists, albums = (map_file(roots, name) for name in (ARTISTS_FILE, ALBUMS_FILE))
    return RawFiles(events=events, artists=artists, albums=albums, size=size or events.parent.name)


def map_file(roots: list[Path], name: str) -> Path:
    folders = [folder for root in roots for folder in (root / "shared_metadata", root)]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"there is no {name}, the map of items to artists or albums",
        where={"looked in": ", ".join(map(str, dict.fromkeys(folders)))},
        fix="recperf data get --help",
    )


class RawEvents:
    """The event file; opening it checks its columns. Its items must be below `items`, the length of the catalogue."""

    def __init__(self, path: Path, items: int = MOST_ID + 1) -> None:
        self.path, self._most_item = path, items - 1
        with reading(path), parquet_file(path) as file:
            self._metadata, schema = file.metadata, file.schema_arrow
        self.rows = int(self._metadata.num_rows)
        if not self.rows:
            raise DataError("the event file has no rows", where={"file": path}, fix=AGAIN)
        kinds = dict(zip(schema.names, schema.types))
        faults = [
            f"{name} is {kinds.get(name, 'missing')}, not one column of {expected}"
            for name, expected in COLUMNS.items()
            if schema.names.count(name) != 1
            or not (_is_text if name == "event_type" else pyarrow().types.is_integer)(kinds[name])
        ]
        if faults:
            raise DataError(
                f"the event file does not have Yambda's columns: {'; '.join(faults)}",
                where={"file": path, "columns": ", ".join(kinds)},
                fix="recperf data import reads events with other columns",
            )

    def time_range(self) -> tuple[int, int]:
        """First and last time."""
        with reading(self.path), parquet_file(self.path) as file:
            batches = file.iter_batches(CHUNK_ROWS, columns=["timestamp"])
            ends = [pyarrow(".compute").min_max(batch.column(0)).as_py() for batch in batches]
        times = [time for end in ends for time in end.values() if time is not None]
        return min(times, default=0), max(times, default=0)

    def chunks(
        self, start_row: int = 0, rows: int = CHUNK_ROWS, *, after: tuple[int, int] | None = None
    ) -> Iterator[EventRows]:
        """All rows from `start_row` on, at most `rows` at a time. `after` is user and time of the previous row."""
        groups = self._metadata.num_row_groups
        ends = np.cumsum([self._metadata.row_group(group).num_rows for group in range(groups)])
        first = int(np.searchsorted(ends, start_row, side="right"))
        row = int(ends[first - 1]) if first else 0
        with reading(self.path), parquet_file(self.path, read_dictionary=["event_type"]) as file:
            for batch in file.iter_batches(rows, row_groups=[*range(first, groups)], columns=[*_FIELDS]):
                skipped = min(len(batch), max(0, start_row - row))
                row += skipped
                if skipped < len(batch):
                    chunk = self._chunk(batch.slice(skipped), row, after)
                    after = int(chunk.uids[-1]), int(chunk.times[-1])
                    row += len(chunk)
                    yield chunk
        if row != max(start_row, self.rows):
            raise _broken(self.path, f"its footer states {self.rows:,} rows, but it has {row:,}")

    def _chunk(self, batch: Any, row: int, after: tuple[int, int] | None) -> EventRows:
        most = {**_MOST, "item_id": self._most_item}
        values = {name: _values(self.path, batch.column(name), name, row, most.get(name)) for name in _FIELDS}
        chunk = EventRows(**{_FIELDS[name]: column for name, column in values.items()})
        keys = chunk.uids.astype(np.uint64) << np.uint64(32) | chunk.times
        late = keys[1:] < keys[:-1]
        at = int(np.argmax(late)) + 1 if late.any() else 0
        before = (int(chunk.uids[at - 1]), int(chunk.times[at - 1])) if at else after
        here = int(chunk.uids[at]), int(chunk.times[at])
        if before is not None and before > here:
            fault = f"user {here[0]} comes after user {before[0]}"
            if here[0] == before[0]:
                fault = f"time goes back from {before[1]} to {here[1]} within user {here[0]}"
            raise _refused(self.path, row + at, f"{fault}; rows must be sorted by user, then by time")
        return chunk


def catalogue(artists: Path, albums: Path) -> NDArray[np.uint32]:
    """Artist and album of every item, 0 if unknown; of several rows of an item the last counts."""
    maps = [_read_map(path, name) for path, name in ((artists, "artist_id"), (albums, "album_id"))]
    bound = SPARSE * max(len(items) for items, _ in maps) + SPARE_ITEMS
    for path, (items, _) in zip((artists, albums), maps):
        if len(items) and items.max() >= bound:
            what = f"item_id is {items.max():,}; maps as long as these have ids below {bound:,}"
            raise _refused(path, int(np.argmax(items)), what)
    catalogue_I2 = np.zeros((1 + max(int(items.max()) for items, _ in maps), 2), np.uint32)
    for column, (items, values) in enumerate(maps):
        catalogue_I2[items, column] = values
    return catalogue_I2


def _read_map(path: Path, name: str) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The items of a map and their artists or albums."""
    columns = ["item_id", name]
    with reading(path), parquet_file(path) as file:
        types = dict(zip(file.schema_arrow.names, file.schema_arrow.types))
        for column in columns:
            if column not in types or not pyarrow().types.is_integer(types[column]):
                actual = types.get(column, "missing")
                raise DataError(f"column {column} is {actual}, not uint32", where={"file": path}, fix=AGAIN)
        table = file.read(columns)
    if not len(table):
        raise DataError("this map has no items", where={"file": path}, fix=AGAIN)
    items, values = (_values(path, one_array(table.column(column)), column, 0, MOST_ID) for column in columns)
    return items, values


def _values(path: Path, column: Any, name: str, row: int, most: int | None) -> NDArray[Any]:
    """The values of a column from a row on, 0 for null where it is allowed; a value that is not allowed is an error."""
    original, is_type = column, name == "event_type"
    if is_type:
        codes = pyarrow(".compute").index_in(column.dictionary, value_set=pyarrow().array(EVENT_TYPES))
        column = codes.take(column.indices)
    kind = np.dtype(np.uint8 if is_type else COLUMNS.get(name, "uint32"))
    most = int(np.iinfo(kind).max) if most is None else most
    values: NDArray[Any] = column.fill_null(0).to_numpy(zero_copy_only=False)
    wrong = (values < 0) | (values > most)
    if column.null_count and name != "played_ratio_pct":
        wrong |= np.asarray(column.is_null())
    if wrong.any():
        index = int(np.argmax(wrong))
        value = original[index].as_py()
        allowed = f"Yambda has {', '.join(EVENT_TYPES)}" if is_type else f"it must be 0 to {most:,}"
        raise _refused(path, row + index, f"{name} is null" if value is None else f"{name} is {value!r}; {allowed}")
    return values.astype(kind, copy=False)


def _refused(path: Path, row: int, what: str) -> DataError:
    """The error for a row, counted from 0; the message counts from 1."""
    return DataError(f"row {row + 1:,} of {path.name}: {what}", where={"file": path, "row": row + 1}, fix=AGAIN)


def identity_of(path: Path) -> dict[str, str | int]:
    """Name, length and digest of the footer of a parquet file, which has sizes and statistics of every part."""
    with reading(path), open_dataset_file(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(8)[:4], "little")
        file.seek(max(0, size - 8 - length))
        return {"name": path.name, "bytes": size, "sha256": hashlib.sha256(file.read()).hexdigest()}


def parquet_file(path: Path, **options: Any) -> Any:
    """Open a parquet file that is read through small buffers, with page checksums verified."""
    return pyarrow(".parquet").ParquetFile(
        path, buffer_size=READ_AHEAD, pre_buffer=False, page_checksum_verification=True, **options
    )


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of pyarrow and of the operating system into a one-line error that names the file."""
    arrow = pyarrow()
    try:
        yield
    except FileNotFoundError:
        raise DataError("the file is missing", where={"file": path}, fix=AGAIN) from None
    except PermissionError:
        raise MachineError("the file may not be read", where={"file": path}, fix="check its permissions") from None
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _broken(path, str(error).split("\n")[0]) from error


def _broken(path: Path, how: str) -> DataError:
    return DataError(f"{path.name} is damaged or not a parquet file: {how}", where={"file": path}, fix=AGAIN)


class Pass(Struct, kw_only=True):
    """How far the pass over the file has come."""

    row: int = 0
    last: tuple[int, int] | None = None
    """User and time of the last row."""
    counts: dict[str, int]
    """Events that are not in the store, by the names in LEFT_OUT."""


def prepare(
    files: RawFiles,
    folder: Path,
    *,
    name: str,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Path:
    """Write the store of these files, or resume it. `progress` receives the rows done and the total."""
    identity = source_identity(files)
    if finished(folder, identity):
        return folder.expanduser()
    catalogue_I2 = catalogue(files.artists, files.albums)
    raw = RawEvents(files.events, len(catalogue_I2))
    t_min, t_max = raw.time_range()
    split = split_of(t_max)
    if t_min >= split.train_end:
        raise DataError(
            f"there is no training event: the stream spans {t_max - t_min:,} s, and its last "
            f"{split.test_end - split.train_end:,} s are reserved for the test",
            where={"file": files.events},
            fix="recperf data import reads short streams without this split",
        )
    with StoreWriter(folder, identity=identity) as writer:
        state = _append_all(writer, raw, split, progress)
        if source_identity(files) != identity:
            what = "the raw files changed while they were read"
            raise DataError(what, where={"file": files.events}, fix="prepare them when they are complete")
        counts = {"raw_events": raw.rows, "train_events": writer.events, **state.counts}
        manifest = EventManifest(
            name=name,
            size=files.size,
            synthetic=False,
            licence=LICENCE,
            groups=[*ITEM_GROUPS],
            split={"t_min": t_min, "t_max": t_max, **vars(split), **counts},
        )
        return writer.finish(catalogue_I2, manifest)


def source_identity(files: RawFiles) -> dict[str, object]:
    """Facts that identify the source of a store."""
    for path in (files.artists, files.albums):
        if not path.is_file():
            raise DataError("the file is missing", where={"file": path}, fix="recperf data get --help")
    return {
        "kind": "yambda",
        "split": [TRAIN_DAYS, GAP_MINUTES, TEST_DAYS],
        "events": identity_of(files.events),
        # The maps are small enough for a digest of their whole content.
        "artists": sha256(files.artists),
        "albums": sha256(files.albums),
    }


def _append_all(writer: StoreWriter, raw: RawEvents, split: Split, progress: Callable[[int, int], None]) -> Pass:
    """Append the training events from the last commit on. Returns the final state of the pass."""
    state = Pass(counts=dict.fromkeys(LEFT_OUT, 0))
    if writer.bookmark:
        state = require(writer.bookmark, Pass, writer.draft / JOURNAL, what="is damaged", at="bookmark")
    # Refuse a disk that is too small before hours of work, not after.
    needed, free = (raw.rows - state.row) * EVENT_BYTES, shutil.disk_usage(writer.draft).free
    if free < needed * ROOM_SHARE:
        raise MachineError(
            f"the disk has {units.size(free)} free; the store needs about {units.size(needed)} more",
            where={"folder": writer.draft},
            fix="free some space, or choose another folder with --store",
        )
    committed = state.row
    for chunk in raw.chunks(committed, CHUNK_ROWS, after=state.last):
        _append(writer, chunk, split, state.counts)
        state.row += len(chunk)
        state.last = int(chunk.uids[-1]), int(chunk.times[-1])
        progress(state.row, raw.rows)
        if state.row - committed >= COMMIT_ROWS:
            writer.commit(state)
            committed = state.row
    writer.commit(state)
    return state


def _append(writer: StoreWriter, rows: EventRows, split: Split, counts: dict[str, int]) -> None:
    """Append the training events of some rows and count the others."""
    times = rows.times.astype(np.int64)
    train = rows.where((times >= split.train_start) & (times < split.train_end))
    if len(train) < len(rows):
        test = (times >= split.test_start) & (times < split.test_end)
        known = int(np.isin(rows.uids[test], np.append(train.uids, writer.state.last_user)).sum())
        counts["test_events"] += known
        counts["test_events_of_unknown_users"] += int(test.sum()) - known
        counts["dropped_before"] += int((times < split.train_start).sum())
        counts["dropped_gap"] += int(((times >= split.train_end) & (times < split.test_start)).sum())
        counts["dropped_last"] += int((times >= split.test_end).sum())
    writer.append(**train.columns())
