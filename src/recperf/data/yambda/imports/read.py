"""A file of someone's events as batches of the columns that were asked for: CSV, TSV, either in gzip, or parquet.

What a file is, its first bytes tell, not its name. Rows are counted from 1, a header and empty lines not among them.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from ....errors import DataError, MachineError, UsageError, closest

Header = Literal["auto", "yes", "no"]
Piece = bytes
_DELIMITERS = ("\t", ",", ";", "|")
_LONGEST_LINE = 1 << 20
_ROWS = 1 << 18
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 20, 16 << 20


def arrow(part: str = "") -> Any:
    """pyarrow or a part of it."""
    try:
        return import_module(f"pyarrow{part}")
    except ImportError:
        raise MachineError("reading events needs the package pyarrow", fix="pip install 'recperf[yambda]'") from None


@dataclass(frozen=True, kw_only=True)
class Batch:
    first: int
    """Rows before this batch."""
    columns: dict[str, Any]
    """A pyarrow array for each role."""
    read: int
    """Bytes of the file up to the end of this batch; of parquet, the share of its rows in bytes."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file that was looked at: its kind, and where each column is. `places` says which column serves which role."""

    path: Path
    bytes: int
    kind: Literal["text", "gzip", "parquet"]
    places: dict[str, int]
    width: int
    delimiter: str = ","
    header_lines: int = 0

    def batches(self, memory: int) -> Iterator[Batch]:
        """All rows in the order of the file, in a small part of `memory`."""
        yield from self._parquet() if self.kind == "parquet" else self._text(memory)

    def _text(self, memory: int) -> Iterator[Batch]:
        """Each piece is parsed by itself: pyarrow's own stream runs up to 32 blocks ahead of what was taken."""
        pa, first, header = arrow(), 0, self.header_lines
        size = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, memory // 64))
        with pa.OSFile(str(self.path)) as raw:
            try:
                stream = pa.CompressedInputStream(raw, "gzip") if self.kind == "gzip" else raw
                for piece in self._pieces(stream, size):
                    table = self._parsed(piece, first, header)
                    header = 0
                    if len(table):
                        columns = {role: table.column(f"c{place}").chunk(0) for role, place in self.places.items()}
                        yield Batch(first=first, columns=columns, read=raw.tell())
                        first += len(table)
            except OSError as error:
                raise _unreadable(self.path, error) from None

    def _pieces(self, stream: Any, size: int) -> Iterator[Piece]:
        """Whole lines, about `size` bytes of them at a time."""
        rest = b""
        while block := stream.read(size):
            rest += block
            end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
            if not end:
                raise self._endless()
            yield rest[:end]
            rest = rest[end:]
        if rest:
            yield rest

    def _parsed(self, piece: Piece, first: int, header: int) -> Any:
        """The rows of a piece; `first` are those before it, `header` the lines at its start that are none."""
        pa, text = arrow(), arrow(".csv")
        bad: list[Any] = []

        def note(row: Any) -> str:
            bad.append(row)
            return "error"

        names = [f"c{place}" for place in self.places.values()]
        read = text.ReadOptions(
            # One thread: else the row of a fault is not known.
            use_threads=False,
            block_size=len(piece) + 1,
            skip_rows=header,
            column_names=[f"c{place}" for place in range(self.width)],
        )
        parse = text.ParseOptions(delimiter=self.delimiter[0], invalid_row_handler=note)
        convert = text.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), include_columns=names, strings_can_be_null=False
        )
        try:
            table = text.read_csv(
                pa.BufferReader(piece), read_options=read, parse_options=parse, convert_options=convert
            )
        except pa.ArrowInvalid as error:
            raise self._malformed(str(error), bad, first - header) from None
        # A quote that is still open at the end of a piece took all lines after it for one value.
        if piece.count(b'"') % 2 and len(table) + header < sum(1 for line in piece.splitlines() if line):
            raise self._endless()
        return table

    def _parquet(self) -> Iterator[Batch]:
        pa = arrow()
        try:
            opened = arrow(".parquet").ParquetFile(str(self.path), buffer_size=1 << 20, page_checksum_verification=True)
            with opened as file:
                rows, first = max(1, file.metadata.num_rows), 0
                names = {role: file.schema_arrow.names[place] for role, place in self.places.items()}
                for batch in file.iter_batches(batch_size=_ROWS, columns=list(names.values()), use_threads=False):
                    columns = {role: batch.column(name) for role, name in names.items()}
                    done = first + len(batch)
                    yield Batch(first=first, columns=columns, read=self.bytes * done // rows)
                    first = done
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self.path, error) from None

    def _malformed(self, message: str, bad: list[Any], before: int) -> DataError:
        if bad:
            row = f"row {before + bad[0].number:,}" if bad[0].number else "a row"
            what = f"{row} has {bad[0].actual_columns} columns; the first line has {bad[0].expected_columns}"
            return DataError(what, where={"file": self.path}, fix="repair that row, or set --delimiter")
        if "UTF8" in message:
            found = re.search(r"Row #(\d+)", message)
            row = f"row {before + int(found[1]):,}" if found else "a row"
            return DataError(f"{row} is not UTF-8 text", where={"file": self.path}, fix="convert the file to UTF-8")
        return _unreadable(self.path, message)

    def _endless(self) -> DataError:
        what = "a row does not end: a quote is left open, or the row is longer than a block"
        return DataError(what, where={"file": self.path}, fix="look for a quote without its pair")


def look(path: Path, columns: Mapping[str, str], *, delimiter: str | None = None, header: Header = "auto") -> Source:
    """Find out what a file is and where its columns are. `columns` names the column of each role."""
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            start = file.read(4)
            size = file.seek(0, 2)
    except IsADirectoryError:
        raise DataError("the events are a folder, not a file", where={"path": path}, fix="name one file") from None
    except FileNotFoundError:
        raise DataError("the file of events does not exist", where={"file": path}, fix="check the path") from None
    except OSError as error:
        what = f"the file of events cannot be opened: {error.strerror}"
        raise MachineError(what, where={"file": path}, fix="check who may read it") from None
    if not size:
        raise DataError("the file of events is empty", where={"file": path}, fix="name a file with events")
    if start == b"PAR1":
        names = _parquet_names(path)
        places = _places(path, columns, names)
        return Source(path=path, bytes=size, kind="parquet", places=places, width=len(names))
    if path.suffix in (".parquet", ".pq"):
        raise DataError("this is not a parquet file", where={"file": path}, fix="name it .csv if it is text")
    return _look_at_text(path, size, "gzip" if start[:2] == b"\x1f\x8b" else "text", columns, delimiter, header)


def _look_at_text(
    path: Path,
    size: int,
    kind: Literal["text", "gzip"],
    columns: Mapping[str, str],
    delimiter: str | None,
    header: Header,
) -> Source:
    line = _first_line(path, kind)
    delimiter = delimiter or _guess_delimiter(path, line)
    try:
        fields = next(csv.reader([line], delimiter=delimiter[0]), [])
    except csv.Error as error:
        what = f"the first line cannot be read: {error}"
        raise DataError(what, where={"file": path}, fix="begin with a header or an event") from None
    # "::" is ":" with an empty column between any two.
    names = [field.strip() for field in (fields[::2] if len(delimiter) == 2 else fields)]
    by_number = all(column.isdecimal() for column in columns.values())
    if header == "auto":
        header = "no" if by_number else "yes"
    if header == "no" and not by_number:
        named = next(column for column in columns.values() if not column.isdecimal())
        what = f"a file without a header has no column {named!r}"
        raise UsageError(what, where={"file": path}, fix=f"give columns by number, 1 to {len(names)}")
    places = _places(path, columns, names if header == "yes" else [""] * len(names))
    return Source(
        path=path,
        bytes=size,
        kind=kind,
        places={role: place * len(delimiter) for role, place in places.items()},
        width=len(fields),
        delimiter=delimiter,
        header_lines=int(header == "yes"),
    )


def _first_line(path: Path, kind: str) -> str:
    try:
        with gzip.open(path) if kind == "gzip" else path.open("rb") as file:
            # Not readline: a lone carriage return ends a line too.
            line = (file.read(_LONGEST_LINE).splitlines(keepends=True) or [b""])[0]
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from None
    if b"\0" in line or len(line) == _LONGEST_LINE:
        raise DataError("this is not a text file", where={"file": path}, fix="give CSV, TSV, .gz of them, or parquet")
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        what = "the first line is not UTF-8 text"
        raise DataError(what, where={"file": path}, fix="convert the file to UTF-8") from None
    if not text.strip():
        raise DataError("the first line is empty", where={"file": path}, fix="begin with a header or an event")
    return text


def _guess_delimiter(path: Path, line: str) -> str:
    if ".tsv" in path.suffixes and "\t" in line:
        return "\t"
    if "::" in line:
        return "::"
    return max(_DELIMITERS, key=lambda mark: (line.count(mark), mark == ","))


def _parquet_names(path: Path) -> list[str]:
    pa = arrow()
    try:
        with arrow(".parquet").ParquetFile(str(path)) as file:
            return [str(name) for name in file.schema_arrow.names]
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _places(path: Path, columns: Mapping[str, str], names: list[str]) -> dict[str, int]:
    places: dict[str, int] = {}
    for role, column in columns.items():
        place = _place(path, role, column, names)
        taken = next((other for other, used in places.items() if used == place), None)
        if taken is not None:
            what = f"column {column!r} is given as {taken} and as {role}"
            raise UsageError(what, where={"file": path}, fix="give each column once")
        places[role] = place
    return places


def _place(path: Path, role: str, column: str, names: list[str]) -> int:
    if names.count(column) == 1:
        return names.index(column)
    if column in names and column:
        what = f"the file has {names.count(column)} columns named {column!r}"
        raise DataError(what, where={"file": path}, fix=f"give the {role} by its number")
    if column.isdecimal() and 1 <= int(column) <= len(names):
        return int(column) - 1
    shown = ", ".join(names) if any(names) else f"1 to {len(names)}"
    guess = closest(column, names)
    raise DataError(
        f"there is no column {column!r} for the {role}; "
        + (f"did you mean {guess!r}?" if guess else f"known: {shown}"),
        where={"file": path, "columns": shown},
        fix=f"give the {role} one of those",
    )


def _unreadable(path: Path, error: Exception | str) -> DataError:
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    return DataError(
        f"the file of events is damaged or cut short: {reason}", where={"file": path}, fix="fetch or write it again"
    )
