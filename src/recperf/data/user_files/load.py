"""Load the columns of a user's file into the DuckDB table `raw`, one column per role, rows in the order of the file.

Text loses the whitespace around it, and empty text is NULL.

Python's csv module reads CSV: DuckDB's reader differs from it where a file has quotes, and does not name the row of
every error. pyarrow reads Parquet, because it verifies checksums of pages and DuckDB does not.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ...files import sha256
from ...stop import poll
from .bad_rows import BadRows
from .database import column_types, literal, optional_package
from .source import LONGEST_LINE, READ_ERRORS, HashedFile, Source, bad_file, unreadable
from .spellings import MISSING

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that have been read, and the bytes of the whole file."""
LIST_ROLE, LIST_MARK = "genres", "|"
"""The role whose values may be lists, and what is put between the values of one."""
_BLOCK = 1 << 20
"""Characters of text that become one table."""
_PARQUET_ROWS = 1 << 16
_NOT_UTF8 = " is not UTF-8 text", "convert it to UTF-8"
_SURROGATE = re.compile("[\ud800-\udfff]")
_WHITESPACE = "".join(chr(code) for code in range(1, 0x3001) if chr(code).isspace())
_ASCII_WHITESPACE = "".join(filter(str.isascii, _WHITESPACE))


def load_file(connection: Any, source: Source, progress: Progress, bad: BadRows) -> str:
    """Create the table `raw` from the file without its bad rows. Returns the SHA-256 of what was read."""
    if source.format == "parquet":
        _insert(connection, source, _parquet_batches(source), progress)
        digest = sha256(source.path)
    else:
        with HashedFile(source.path) as file:
            _insert(connection, source, _text_batches(source, file, bad), progress)
            digest = file.sha256.hexdigest()
    progress(source.size, source.size)
    return digest


def tables_of(source: Source) -> Iterator[Any]:
    """The rows of a file as pyarrow tables, whose columns are named by `source.columns`."""
    if source.format == "parquet":
        yield from (table for table, _ in _parquet_batches(source))
        return
    with HashedFile(source.path) as file:
        yield from (table for table, _ in _text_batches(source, file, BadRows(source.path)))


def _trimmed(name: str) -> str:
    """SQL for text without the whitespace around it."""
    # Most values are printable ASCII without spaces; testing for that is far faster than trimming.
    trimmed = f"nullif(trim({name}, {literal(_WHITESPACE)}), '')"
    return f"CASE WHEN regexp_full_match({name}, '[!-~]+') THEN {name} ELSE {trimmed} END"


def _trim_ascii(table: Any) -> tuple[Any, set[str]]:
    """The table with every column of ASCII text trimmed, which pyarrow does several times as fast, and their names."""
    arrow, compute, is_trimmed = optional_package("pyarrow"), optional_package("pyarrow.compute"), set()
    columns = {}
    for name, column in zip(table.column_names, table.columns):
        if column.type == arrow.string() and compute.all(compute.string_is_ascii(column), min_count=0).as_py() is True:
            column = compute.ascii_trim(column, characters=_ASCII_WHITESPACE)
            column = compute.if_else(compute.equal(column, ""), arrow.scalar(None, arrow.string()), column)
            is_trimmed.add(name)
        columns[name] = column
    return arrow.table(columns), is_trimmed


def _insert(connection: Any, source: Source, batches: Iterator[tuple[Any, int]], progress: Progress) -> None:
    """Fill the table `raw` from pyarrow tables, each with the number of bytes read so far."""
    duckdb, into = optional_package("duckdb"), "CREATE TABLE raw AS"
    for table, bytes_read in batches:
        table, is_trimmed = _trim_ascii(table)
        try:
            connection.register("batch", table)
            types = {f'"{role}"': kind for role, kind in column_types(connection, "batch").items()}
            texts = [
                f"{_trimmed(name)} AS {name}"
                for name, kind in types.items()
                if kind == "VARCHAR" and name[1:-1] not in is_trimmed
            ]
            replaced = f"REPLACE ({', '.join(texts)})" if texts else ""
            connection.execute(f"{into} SELECT * {replaced} FROM batch")
        except (duckdb.NotImplementedException, duckdb.InvalidInputException) as error:
            raise unreadable(source.path, error) from None
        connection.unregister("batch")
        into = "INSERT INTO raw"
        progress(min(bytes_read, source.size), source.size)


class _Lines:
    """The lines of a text. `row` is the record that is being read, and `start` where it began; its reader sets both."""

    def __init__(self, path: Path, text: io.TextIOWrapper) -> None:
        self._path, self._text = path, text
        self.size = self.start = 0
        self.row = 1
        self.suspicious = False
        """Whether a line had characters that may be none of UTF-8, or NUL; who has looked sets it back."""

    def __iter__(self) -> Iterator[str]:
        next_poll = 0
        while line := self._text.readline(LONGEST_LINE + 1):
            self.size += len(line)
            # All lines of a record: a quoted field may run over many.
            if self.size - self.start > LONGEST_LINE:
                what = f"row {self.row:,} does not end within {LONGEST_LINE:,} characters"
                raise bad_file(self._path, what, "end every line, and look for a quote without its pair")
            if self.size > next_poll:
                poll()
                next_poll = self.size + _BLOCK
            if not line.isascii() or "\0" in line:
                self.suspicious = True
            yield line


def _text_batches(source: Source, hashed: HashedFile, bad: BadRows) -> Iterator[tuple[Any, int]]:
    """Tables of about `_BLOCK` characters of text; the last one is empty."""
    arrow = optional_package("pyarrow")
    rows: list[Sequence[str | None]] = [[]]
    with io.BufferedReader(hashed) as file:
        stream = gzip.GzipFile(fileobj=file) if source.gzipped else file
        # Bytes that are not UTF-8 become surrogates; then the row is known.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        lines = _Lines(source.path, text)
        records = _RECORDS[source.format](source, lines, bad)
        while rows:
            start, rows = lines.size, []
            try:
                for record in records:
                    rows.append(record)
                    if lines.size - start >= _BLOCK:
                        break
            except READ_ERRORS as error:
                raise unreadable(source.path, error) from None
            values = list(zip(*rows)) or [()] * len(source.names)
            columns = {role: values[position] for role, position in source.columns.items()}
            yield (
                arrow.table({role: arrow.array(column, arrow.string()) for role, column in columns.items()}),
                file.tell(),
            )


def _csv_records(source: Source, lines: _Lines, bad: BadRows) -> Iterator[Sequence[str | None]]:
    """Read records as Python's csv module does, without the header and blank lines; all have the same columns."""
    # A delimiter of two characters is read as one, with an empty column between any two.
    step, lines.row = len(source.delimiter), 0 if source.has_header else 1
    width, used = (len(source.names) - 1) * step + 1, [position * step for position in source.columns.values()]
    try:
        for record in csv.reader(lines, delimiter=source.delimiter[0], strict=True):
            row, lines.start = lines.row, lines.size
            if not record:
                continue
            lines.row += 1
            if len(record) != width or (step == 2 and any(record[1::step])):
                what = f" has {-(-len(record) // step)} columns; the first line has {len(source.names)}"
                bad.add(row, what, "repair that row, or set --delimiter")
            elif row and not (lines.suspicious and _is_flawed(lines, row, [record[at] for at in used], bad)):
                yield record if step == 1 else record[::step]
    except csv.Error as error:
        what = f"row {lines.row:,} is not valid CSV: {error}"
        raise bad_file(source.path, what, "look for a quote without its pair") from None


def _json_records(source: Source, lines: _Lines, bad: BadRows) -> Iterator[Sequence[str | None]]:
    """Read the values of JSON objects as text; numbers keep their digits, and blank lines are skipped."""
    lists, used = source.columns.get(LIST_ROLE), list(source.columns.values())
    for line in lines:
        row, lines.start = lines.row, lines.size
        if not line.strip():
            continue
        lines.row += 1
        try:
            record = json.loads(line, parse_int=str, parse_float=str)
            if not isinstance(record, dict):
                raise ValueError("not an object")
            values: list[Any] = [record.get(name) for name in source.names]
            if lists is not None and isinstance(values[lists], list):
                values[lists] = LIST_MARK.join(map(str, values[lists]))
            values = [value if isinstance(value, str | None) else json.dumps(value) for value in values]
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            bad.add(row, f" is not a JSON object: {why}", "write one object on each line")
            continue
        # An escape writes any character in ASCII.
        if not ((lines.suspicious or "\\u" in line) and _is_flawed(lines, row, [values[at] for at in used], bad)):
            yield values


def _sequence_records(source: Source, lines: _Lines, bad: BadRows) -> Iterator[Sequence[str | None]]:
    """Read lines of a user and items, separated by whitespace or commas, as a pair of user and item for each item."""
    lines.row = 0 if source.has_header else 1
    for line in lines:
        row, lines.start = lines.row, lines.size
        fields = line.replace(",", " ").split()
        lines.row += bool(fields)
        if not row or not fields or (lines.suspicious and _is_flawed(lines, row, fields, bad)):
            continue
        missing = next((field for field in fields if field in MISSING), None)
        if missing is not None or len(fields) == 1:
            what = ": a user without items" if missing is None else f": {missing!r} stands for a missing value"
            bad.add(row, what, "write a user and at least one item on each line")
            continue
        yield from ((fields[0], item) for item in fields[1:])


_RECORDS = {"csv": _csv_records, "json": _json_records, "sequences": _sequence_records}


def _is_flawed(lines: _Lines, row: int, fields: Sequence[str | None], bad: BadRows) -> bool:
    """Whether a row is left out because its text is not UTF-8 or has a NUL byte."""
    lines.suspicious = False
    text = "".join(filter(None, fields))
    if _SURROGATE.search(text):
        bad.add(row, *_NOT_UTF8)
    elif "\0" in text:
        bad.add(row, " has a NUL byte", "write the file again, as text")
    else:
        return False
    return True


def _parquet_batches(source: Source) -> Iterator[tuple[Any, int]]:
    arrow, first_row = optional_package("pyarrow"), 1
    names = {role: source.names[position] for role, position in source.columns.items()}
    try:
        parquet = optional_package("pyarrow.parquet")
        with parquet.ParquetFile(str(source.path), buffer_size=1 << 20, page_checksum_verification=True) as file:
            # An empty batch first: a file without rows has columns too.
            empty = arrow.RecordBatch.from_pylist([], schema=file.schema_arrow)
            batches = file.iter_batches(_PARQUET_ROWS, columns=list(names.values()), use_threads=False)
            for batch in chain([empty], batches):
                columns = {
                    role: _plain(_text(batch.column(name), role), source, first_row) for role, name in names.items()
                }
                first_row += len(batch)
                yield arrow.table(columns), source.size * (first_row - 1) // max(1, file.metadata.num_rows)
    except (arrow.ArrowException, OSError) as error:
        raise unreadable(source.path, error) from None


def _text(column: Any, role: str) -> Any:
    """A column of lists as text, for the role that may have several values."""
    arrow = optional_package("pyarrow")
    is_list = arrow.types.is_list(column.type) or arrow.types.is_large_list(column.type)
    if role != LIST_ROLE or not is_list:
        return column
    return optional_package("pyarrow.compute").binary_join(column.cast(arrow.list_(arrow.string())), LIST_MARK)


def _plain(column: Any, source: Source, first_row: int) -> Any:
    """Convert the types that DuckDB does not read as they are meant; other columns stay as they are."""
    arrow = optional_package("pyarrow")
    types = arrow.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_float16(column.type):
        return column.cast(arrow.float32())
    if types.is_timestamp(column.type):
        return column.cast(arrow.timestamp("us", column.type.tz), safe=False)
    if types.is_binary(column.type) or types.is_large_binary(column.type) or types.is_binary_view(column.type):
        try:
            return column.cast(arrow.string())
        except arrow.ArrowInvalid:
            texts = (value.as_py().decode(errors="surrogateescape") if value.is_valid else "" for value in column)
            wrong = (index for index, text in enumerate(texts) if _SURROGATE.search(text))
            what, fix = _NOT_UTF8
            raise bad_file(source.path, f"row {first_row + next(wrong):,}{what}", fix) from None
    return column
