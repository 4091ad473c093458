"""Raw Yambda: finds its files and reads its events in chunks of bounded memory; every value is checked.

The parquet reader streams pages through small buffers, so that memory depends on the chunk size and not on the row
groups of the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, MachineError, UsageError
from ...files import open_linked
from ..rows import pyarrow
from .schema import ALBUMS_FILE, ARTISTS_FILE, COLUMNS, EVENT_TYPES, EVENTS_FILE, IDS, MOST_ID

READ_AHEAD = 1 << 20
"""Bytes buffered per column."""
AGAIN = "get the file again: recperf data get --help"
_MOST = dict.fromkeys(IDS, MOST_ID) | {"is_organic": 1}
"""The largest value of a column whose type allows more."""


@dataclass(frozen=True, kw_only=True)
class RawFiles:
    """The three files of a raw dataset."""

    events: Path
    artists: Path
    albums: Path
    size: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Consecutive rows of the event file; every array has one entry per row."""

    first_row: int
    uids: NDArray[np.uint32]
    items: NDArray[np.uint32]
    times: NDArray[np.uint32]
    organic: NDArray[np.uint8]
    types: NDArray[np.uint8]
    """Indices of `EVENT_TYPES`."""
    ratios: NDArray[np.uint16]
    """Played ratio in percent, 0 for null."""

    def __len__(self) -> int:
        return len(self.uids)


def locate(path: Path, size: str | None = None) -> RawFiles:
    """Find the raw files in a folder: events in `flat/<size>/` (as on the hub), in `raw/<size>/`, or in the folder."""
    path = path.expanduser()
    root = path.parent if path.is_file() else path
    events = [path] if path.is_file() else _event_files(root, size)
    if path.is_file():
        with path.open("rb") as opened:
            if opened.read(4) != b"PAR1":
                raise _broken(path, "it does not begin as one")
    if not events:
        others = sorted({f"yambda-{file.parent.name}" for file in _event_files(root, None)})
        raise DataError(
            f"there is no {EVENTS_FILE} of this dataset here" + (f", but of {', '.join(others)}" if others else ""),
            where={
                "folder": root,
                "looked for": f"flat/{size or '<size>'}/, raw/{size or '<size>'}/, the folder itself",
            },
            fix=f"{others[0]} --path {root}" if others else "name another folder with --path; recperf data get --help",
        )
    if len(events) > 1:
        sizes = sorted({file.parent.name for file in events})
        raise UsageError(
            f"there are several datasets here: {', '.join(sizes)}", where={"folder": root}, fix="name one of them"
        )
    file = events[0]
    inside = file.parent.parent.name in ("flat", "raw")
    places = [root, file.parent, *([file.parents[2]] if inside else [])]
    return RawFiles(
        events=file,
        artists=_map_file(places, ARTISTS_FILE),
        albums=_map_file(places, ALBUMS_FILE),
        size=size or (file.parent.name if inside else "own"),
    )


def _event_files(root: Path, size: str | None) -> list[Path]:
    for part in ("flat", "raw"):
        if files := sorted(root.glob(f"{part}/{size or '*'}/{EVENTS_FILE}")):
            return files
    return [root / EVENTS_FILE] if (root / EVENTS_FILE).is_file() else []


def _map_file(places: list[Path], name: str) -> Path:
    folders = [folder for place in places for folder in (place / "shared_metadata", place)]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"there is no {name}, the map of items to artists or albums",
        where={"looked in": ", ".join(map(str, dict.fromkeys(folders)))},
        fix="recperf data get --help",
    )


class RawEvents:
    """The event file; opening it checks its columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path), parquet_file(self.path) as file:
            self._metadata = file.metadata
            self._arrow_schema = file.schema_arrow
        self.rows = int(self._metadata.num_rows)
        if not self.rows:
            raise DataError("the event file has no rows", where={"file": path}, fix=AGAIN)
        self._check_columns()

    def time_range(self) -> tuple[int, int]:
        """First and last time, from the statistics in the footer."""
        groups = [self._metadata.row_group(group) for group in range(self._metadata.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(group.num_columns) if group.num_rows]
        statistics = [column.statistics for column in columns if column.path_in_schema == "timestamp"]
        if not all(known is not None and known.has_min_max for known in statistics):
            raise DataError("the event file has no statistics of its times", where={"file": self.path}, fix=AGAIN)
        return min(int(known.min) for known in statistics), max(int(known.max) for known in statistics)

    def chunks(
        self, start_row: int = 0, rows: int = 1 << 20, *, after: tuple[int, int] | None = None
    ) -> Iterator[Chunk]:
        """All rows from `start_row` on, at most `rows` at a time. `after` is user and time of the previous row."""
        names = [name for name in COLUMNS if name != "track_length_seconds"]
        groups, row = self._groups_from(start_row)
        with reading(self.path), parquet_file(self.path, read_dictionary=["event_type"]) as file:
            for batch in file.iter_batches(rows, row_groups=groups, columns=names):
                skipped = min(len(batch), max(0, start_row - row))
                row += skipped
                if skipped < len(batch):
                    chunk = self._chunk(batch.slice(skipped), row)
                    self._check_order(chunk, after)
                    after = int(chunk.uids[-1]), int(chunk.times[-1])
                    row += len(chunk)
                    yield chunk
        if row != max(start_row, self.rows):
            raise _broken(self.path, f"its footer states {self.rows:,} rows, but it has {row:,}")

    def _groups_from(self, start_row: int) -> tuple[list[int], int]:
        """The row groups from the one with `start_row` on, and the first row of the first."""
        groups = self._metadata.num_row_groups
        ends = np.cumsum([self._metadata.row_group(group).num_rows for group in range(groups)])
        first = int(np.searchsorted(ends, start_row, side="right"))
        return [*range(first, groups)], int(ends[first - 1]) if first else 0

    def _check_columns(self) -> None:
        types = pyarrow().types
        kinds = dict(zip(self._arrow_schema.names, self._arrow_schema.types))
        missing = [name for name in COLUMNS if name not in kinds]
        twice = [f"there are two columns {name}" for name in COLUMNS if self._arrow_schema.names.count(name) > 1]
        wrong = [
            f"{name} is {kinds[name]}, not {expected}"
            for name, expected in COLUMNS.items()
            if name in kinds and not (_is_text(kinds[name]) if name == "event_type" else types.is_integer(kinds[name]))
        ]
        if missing or twice or wrong:
            faults = ([f"there is no {', '.join(missing)}"] if missing else []) + twice + wrong
            raise DataError(
                f"the event file does not have Yambda's columns: {'; '.join(faults)}",
                where={"file": self.path, "columns": ", ".join(kinds)},
                fix="recperf data import reads events with other columns",
            )

    def _chunk(self, batch: Any, row: int) -> Chunk:
        values = {name: self._values(batch.column(name), name, row) for name in batch.schema.names}
        return Chunk(
            first_row=row,
            uids=values["uid"],
            items=values["item_id"],
            times=values["timestamp"],
            organic=values["is_organic"],
            types=values["event_type"],
            ratios=values["played_ratio_pct"],
        )

    def _values(self, column: Any, name: str, row: int) -> NDArray[Any]:
        """The values of a column, 0 for null where it is allowed; a value that is not allowed is an error."""
        original, is_type = column, name == "event_type"
        if is_type:
            arrow = pyarrow()
            column = (
                pyarrow(".compute").index_in(column.dictionary, value_set=arrow.array(EVENT_TYPES)).take(column.indices)
            )
        kind = np.dtype(np.uint8 if is_type else COLUMNS[name])
        most = _MOST.get(name, int(np.iinfo(kind).max))
        wrong = np.zeros(0, np.bool_) if name == "played_ratio_pct" or not column.null_count else nulls(column)
        values: NDArray[Any] = column.fill_null(0).to_numpy(zero_copy_only=False)
        limited = name in _MOST or values.dtype != kind
        if limited and len(values) and (values.min() < 0 or values.max() > most):
            wrong = (values < 0) | (values > most)
        if wrong.any():
            place = int(np.argmax(wrong))
            value = original[place].as_py()
            allowed = f"Yambda has {', '.join(EVENT_TYPES)}" if is_type else f"it must be 0 to {most:,}"
            self._refuse(row + place, f"{name} is null" if value is None else f"{name} is {value!r}; {allowed}")
        return values.astype(kind, copy=False)

    def _check_order(self, chunk: Chunk, after: tuple[int, int] | None) -> None:
        """Require rows sorted by user, then by time."""
        keys = chunk.uids.astype(np.uint64) << np.uint64(32) | chunk.times
        late = keys[1:] < keys[:-1]
        at = int(np.argmax(late)) + 1 if late.any() else 0
        before = (int(chunk.uids[at - 1]), int(chunk.times[at - 1])) if at else after
        here = int(chunk.uids[at]), int(chunk.times[at])
        if before is None or before <= here:
            return
        fault = (
            f"user {here[0]} comes after user {before[0]}"
            if here[0] < before[0]
            else f"time goes back from {before[1]} to {here[1]} within user {here[0]}"
        )
        self._refuse(chunk.first_row + at, f"{fault}; rows must be sorted by user, then by time")

    def _refuse(self, row: int, what: str) -> None:
        """Raise an error for a row, counted from 0; the message counts from 1."""
        where = {"file": self.path, "row": row + 1}
        raise DataError(f"row {row + 1:,} of the event file: {what}", where=where, fix=AGAIN)


def require_known(chunk: Chunk, items: int, files: RawFiles) -> None:
    """Refuse an event whose item is outside a catalogue of `items` items."""
    outside = chunk.items >= items
    if outside.any():
        place = int(np.argmax(outside))
        row = chunk.first_row + place + 1
        raise DataError(
            f"row {row:,} of the event file: item {chunk.items[place]:,} is outside the catalogue, which ends at "
            f"{items - 1:,}",
            where={"file": files.events, "row": row, "catalogue": files.artists.parent},
            fix="the two maps must be of the same release as the events",
        )


def identity_of(path: Path) -> dict[str, str | int]:
    """Name, length and digest of the footer of a parquet file, which has sizes and statistics of every part."""
    with reading(path), open_linked(path) as file:
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


def nulls(column: Any) -> NDArray[np.bool_]:
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False))


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
