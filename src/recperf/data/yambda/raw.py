"""Raw Yambda: where its files are, and its events piece by piece in bounded memory, every value checked.

The parquet reader streams pages through small buffers, so that memory depends on the piece asked for and not on how the
file was cut into row groups.
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
from .schema import ALBUMS_FILE, ARTISTS_FILE, COLUMNS, EVENT_TYPES, EVENTS_FILE, IDS, MOST_ID, NULLABLE

READ_AHEAD = 1 << 20
"""Bytes buffered for each column."""
_TIME_ROWS = 1 << 20
AGAIN = "get the file again: recperf data get --help"
_UNKNOWN = 255


@dataclass(frozen=True, kw_only=True)
class RawFiles:
    """The three files a dataset is prepared from."""

    events: Path
    artists: Path
    albums: Path
    size: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Consecutive rows of the event file, one entry of every array a row."""

    first_row: int
    uids: NDArray[np.uint32]
    items: NDArray[np.uint32]
    times: NDArray[np.uint32]
    organic: NDArray[np.uint8]
    types: NDArray[np.uint8]
    """Places in `EVENT_TYPES`."""
    ratios: NDArray[np.uint16]
    """Played ratio in percent, 0 for null."""
    ratio_null: NDArray[np.bool_]
    lengths: NDArray[np.uint32]
    """Track length in seconds, 0 for null; empty when it was not asked for."""
    length_null: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.uids)


def need_pyarrow() -> Any:
    """The pyarrow package with its parquet module; where it is missing, an error that says how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MachineError(
            f"reading parquet files needs pyarrow: {error}", fix="pip install 'recperf[yambda]'"
        ) from error
    return pyarrow


def locate(path: Path, size: str | None = None) -> RawFiles:
    """The raw files in a folder: events as the hub has them (`flat/<size>/`), in `raw/<size>/`, or right there."""
    path = path.expanduser()
    root = path.parent if path.is_file() else path
    events = [path] if path.is_file() else _event_files(root, size)
    if not events:
        tried = [f"{part}/{size or '<size>'}/{EVENTS_FILE}" for part in ("flat", "raw")]
        raise DataError(
            f"there is no {EVENTS_FILE} here",
            where={"folder": root, "looked for": ", ".join([*tried, EVENTS_FILE])},
            fix="recperf data get --help",
        )
    if len(events) > 1:
        found = sorted({file.parent.name for file in events})
        raise UsageError(
            f"there are several datasets here: {', '.join(found)}", where={"folder": root}, fix="say which by its name"
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
        if found := sorted(root.glob(f"{part}/{size or '*'}/{EVENTS_FILE}")):
            return found
    return [root / EVENTS_FILE] if (root / EVENTS_FILE).is_file() else []


def _map_file(places: list[Path], name: str) -> Path:
    tried = [folder for place in places for folder in (place / "shared_metadata", place)]
    for folder in tried:
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"there is no {name}: artists and albums of the items are read from it",
        where={"looked in": ", ".join(map(str, dict.fromkeys(tried)))},
        fix="recperf data get --help",
    )


class RawEvents:
    """The event file, opened and its columns checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path), self._file(()) as file:
            self._metadata = file.metadata
            self._arrow_schema = file.schema_arrow
        self.rows = int(self._metadata.num_rows)
        if not self.rows:
            raise DataError("the event file has no rows", where={"file": path}, fix=AGAIN)
        self._check_columns()
        self._codes = not _is_text(self._arrow_schema.field("event_type").type)

    @property
    def notes(self) -> dict[bytes, bytes]:
        """What its writer noted in the file."""
        return dict(self._arrow_schema.metadata or {})

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this file from another: its footer holds sizes and statistics of every part."""
        return identity_of(self.path)

    def time_range(self) -> tuple[int, int]:
        """First and last time, from the footer's statistics; parts that have none are read for it."""
        low, high, unknown = [], [], []
        with reading(self.path):
            for group in range(self._metadata.num_row_groups):
                part = self._metadata.row_group(group)
                columns = (part.column(index) for index in range(part.num_columns))
                facts = next(column for column in columns if column.path_in_schema == "timestamp").statistics
                if facts is not None and facts.has_min_max:
                    low.append(int(facts.min))
                    high.append(int(facts.max))
                elif part.num_rows:
                    unknown.append(group)
            if unknown:
                with self._file() as file:
                    for batch in file.iter_batches(_TIME_ROWS, row_groups=unknown, columns=["timestamp"]):
                        times = batch.column(0).drop_null().to_numpy(zero_copy_only=False)
                        if len(times):
                            low.append(int(times.min()))
                            high.append(int(times.max()))
        if not low:
            raise DataError("the event file has no timestamp", where={"file": self.path}, fix=AGAIN)
        return min(low), max(high)

    def chunks(
        self, start_row: int = 0, rows: int = 1 << 20, *, after: tuple[int, int] | None = None, lengths: bool = True
    ) -> Iterator[Chunk]:
        """All rows from `start_row` on, at most `rows` at a time. `after` is user and time of the row before."""
        names = [name for name in COLUMNS if lengths or name != "track_length_seconds"]
        groups, row = self._groups_from(start_row)
        with reading(self.path), self._file() as file:
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
            raise _broken(self.path, f"its footer promises {self.rows:,} rows, it holds {row:,}")

    def _file(self, as_dictionary: tuple[str, ...] = ("event_type",)) -> Any:
        return need_pyarrow().parquet.ParquetFile(
            self.path,
            read_dictionary=list(as_dictionary),
            buffer_size=READ_AHEAD,
            pre_buffer=False,
            page_checksum_verification=True,
        )

    def _groups_from(self, start_row: int) -> tuple[list[int], int]:
        """Row groups that hold `start_row` and later ones, and the first row of the first of them."""
        first, passed = 0, 0
        groups = self._metadata.num_row_groups
        while first < groups and passed + self._metadata.row_group(first).num_rows <= start_row:
            passed += self._metadata.row_group(first).num_rows
            first += 1
        return [*range(first, groups)], passed

    def _check_columns(self) -> None:
        types = need_pyarrow().types
        kinds = dict(zip(self._arrow_schema.names, self._arrow_schema.types))
        missing = [name for name in COLUMNS if name not in kinds]
        twice = [f"{name} is there twice" for name in COLUMNS if self._arrow_schema.names.count(name) > 1]
        wrong = [
            f"{name} is {kinds[name]}, not {wanted}"
            for name, wanted in COLUMNS.items()
            if name in kinds and not (types.is_integer(kinds[name]) or (name == "event_type" and _is_text(kinds[name])))
        ]
        if missing or twice or wrong:
            faults = ([f"there is no {', '.join(missing)}"] if missing else []) + twice + wrong
            raise DataError(
                f"the event file does not have Yambda's columns: {'; '.join(faults)}",
                where={"file": self.path, "columns": ", ".join(kinds)},
                fix="recperf data import brings in events with other columns",
            )

    def _chunk(self, batch: Any, row: int) -> Chunk:
        nothing = np.zeros(0, np.bool_)
        numbers = {name: self._numbers(batch, name, row) for name in batch.schema.names if name != "event_type"}
        organic = numbers["is_organic"]
        if (organic > 1).any():
            place = int(np.argmax(organic > 1))
            self._refuse(row + place, f"is_organic is {organic[place]}; it can be 0 or 1")
        asked = "track_length_seconds" in numbers
        return Chunk(
            first_row=row,
            uids=numbers["uid"],
            items=numbers["item_id"],
            times=numbers["timestamp"],
            organic=organic,
            types=self._types(batch.column("event_type"), row),
            ratios=numbers["played_ratio_pct"],
            ratio_null=nulls(batch.column("played_ratio_pct")),
            lengths=numbers["track_length_seconds"] if asked else np.zeros(0, np.uint32),
            length_null=nulls(batch.column("track_length_seconds")) if asked else nothing,
        )

    def _numbers(self, batch: Any, name: str, row: int) -> NDArray[Any]:
        column, kind = batch.column(name), np.dtype(COLUMNS[name])
        if column.null_count:
            if name not in NULLABLE:
                self._refuse(row + int(np.argmax(nulls(column))), f"{name} is null")
            column = column.fill_null(0)
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        most = MOST_ID if name in IDS else int(np.iinfo(kind).max)
        if (values.dtype != kind or name in IDS) and len(values) and (values.min() < 0 or values.max() > most):
            place = int(np.argmax((values < 0) | (values > most)))
            self._refuse(row + place, f"{name} is {values[place]}; it must be 0 to {most:,}")
        return values.astype(kind, copy=False)

    def _types(self, column: Any, row: int) -> NDArray[np.uint8]:
        if column.null_count:
            self._refuse(row + int(np.argmax(nulls(column))), "event_type is null")
        if self._codes:
            names: list[Any] = []
            values = column.to_numpy(zero_copy_only=False)
            unknown = (values < 0) | (values >= len(EVENT_TYPES))
            codes = np.where(unknown, 0, values).astype(np.uint8)
        else:
            names = column.dictionary.to_pylist()
            known = [EVENT_TYPES.index(name) if name in EVENT_TYPES else _UNKNOWN for name in names]
            values = column.indices.to_numpy(zero_copy_only=False)
            codes = np.array(known, np.uint8)[values]
            unknown = codes == _UNKNOWN
        if unknown.any():
            place = int(np.argmax(unknown))
            found = values[place] if self._codes else repr(names[values[place]])
            self._refuse(row + place, f"event_type is {found}; Yambda has {', '.join(EVENT_TYPES)}")
        return codes

    def _check_order(self, chunk: Chunk, after: tuple[int, int] | None) -> None:
        """Users ascending, a user's events by time."""
        keys = chunk.uids.astype(np.uint64) << np.uint64(32) | chunk.times
        late = keys[1:] < keys[:-1]
        at = int(np.argmax(late)) + 1 if late.any() else 0
        before = (int(chunk.uids[at - 1]), int(chunk.times[at - 1])) if at else after
        here = int(chunk.uids[at]), int(chunk.times[at])
        if before is None or before <= here:
            return
        wrong = (
            f"user {here[0]} comes after user {before[0]}"
            if here[0] < before[0]
            else f"time goes back from {before[1]} to {here[1]} within user {here[0]}"
        )
        self._refuse(chunk.first_row + at, f"{wrong}; rows must be ordered by user, then by time")

    def _refuse(self, row: int, what: str) -> None:
        """`row` counts from 0; people count from 1."""
        where = {"file": self.path, "row": row + 1}
        raise DataError(f"row {row + 1:,} of the event file: {what}", where=where, fix=AGAIN)


def require_known(chunk: Chunk, items: int, files: RawFiles) -> None:
    """Refuse an event whose item is outside a catalogue of that length."""
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


def identity_of(path: Path) -> dict[str, Any]:
    """Name, length and digest of the footer of a parquet file."""
    with reading(path), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(8)[:4], "little")
        file.seek(max(0, size - 8 - length))
        return {"name": path.name, "bytes": size, "sha256": hashlib.sha256(file.read()).hexdigest()}


def nulls(column: Any) -> NDArray[np.bool_]:
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False))


def _is_text(kind: Any) -> bool:
    types = need_pyarrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what pyarrow and the system say of a file that cannot be read into one line about it."""
    arrow = need_pyarrow()
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
