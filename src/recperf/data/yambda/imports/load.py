"""Load the columns of a user's file into the DuckDB table `raw`, one column per role, rows in the order of the file.

Text loses the whitespace around it, and empty text is NULL.

CSV is read exactly as Python's csv module reads it. DuckDB reads files without quote characters, several times faster.
Where a file has quotes DuckDB differs (a space before a quote, a carriage return inside quotes), so Python's csv module
itself reads those files. It also reads what DuckDB rejects, and so names the row of every error. pyarrow reads Parquet,
because it verifies checksums of pages and DuckDB does not.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import Any

from ....errors import DataError
from .database import column_types, fetch_row, literal, optional_package
from .source import READ_ERRORS, Source, bad_file, unreadable

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that have been read, and the bytes of the whole file."""
_SMALLEST_BUFFER, _LARGEST_BUFFER = 1 << 18, 16 << 20
_ROWS_AT_ONCE = 1024
_PARQUET_ROWS = 1 << 16
_POLL_SECONDS = 0.1
_SURROGATE = re.compile("[\ud800-\udfff]")
_WHITESPACE = "".join(chr(code) for code in range(1, 0x3001) if chr(code).isspace())


def load_file(connection: Any, source: Source, *, memory: int, progress: Progress) -> None:
    """Create the table `raw` from the file."""
    buffer = min(_LARGEST_BUFFER, max(_SMALLEST_BUFFER, memory // 64))
    if source.format != "csv" or not _load_plain_csv(connection, source, buffer, progress):
        batches = _parquet_batches(source) if source.format == "parquet" else _text_batches(source, buffer)
        _insert(connection, source, batches, progress)
    progress(source.size, source.size)


def _load_plain_csv(connection: Any, source: Source, buffer: int, progress: Progress) -> bool:
    """Let DuckDB read a file without quotes. Answers False where only Python's csv module is certain to be right."""
    duckdb, delimiters = optional_package("duckdb"), _count_delimiters(source, buffer)
    if delimiters is None:
        return False
    columns = ", ".join(f"'c{position}': 'VARCHAR'" for position in range(len(source.names)))
    names = {role: f"c{position}" for role, position in source.columns.items()}
    scan = (
        f"read_csv({literal(str(source.path))}, columns={{{columns}}}, auto_detect=false, "
        f"delim={literal(source.delimiter)}, quote='', escape='', header={str(source.has_header).lower()}, "
        f"strict_mode=true, null_padding=false, buffer_size={buffer}, max_line_size={buffer // 2}, "
        f"compression='{'gzip' if source.gzipped else 'none'}')"
    )
    try:
        _run(connection, f"CREATE TABLE raw AS SELECT {_selection(names, names)} FROM {scan}", source, progress)
    except (duckdb.InvalidInputException, duckdb.NotImplementedException, duckdb.BinderException):
        return False
    # DuckDB ignores one empty column too many at the end of a row; the count of delimiters shows it.
    rows = fetch_row(connection, "SELECT count(*) FROM raw")[0] + source.has_header
    if rows * (len(source.names) - 1) == delimiters:
        return True
    connection.execute("DROP TABLE raw")
    return False


def _count_delimiters(source: Source, buffer: int) -> int | None:
    """Count the delimiters of a file, or answer None if it has a quote character or several kinds of line endings."""
    delimiter, tail = source.delimiter.encode(), b""
    counts = dict.fromkeys((b"\r", b"\n", b"\r\n", delimiter), 0)
    try:
        with source.open() as file:
            while block := file.read(buffer):
                if b'"' in block:
                    return None
                for mark in counts:
                    counts[mark] += (tail + block if len(mark) > 1 else block).count(mark)
                tail = block[-max(1, len(delimiter) - 1) :]
    except READ_ERRORS as error:
        raise unreadable(source.path, error) from None
    endings = {counts[b"\r"], counts[b"\n"], counts[b"\r\n"]}
    return counts[delimiter] if len(endings) == 1 or 0 in (counts[b"\r"], counts[b"\n"]) else None


def _run(connection: Any, query: str, source: Source, progress: Progress) -> None:
    """Execute a query on another thread, and meanwhile report DuckDB's own progress."""
    with ThreadPoolExecutor(1) as pool:
        execution = pool.submit(connection.execute, query)
        try:
            while not wait([execution], timeout=_POLL_SECONDS).done:
                percent = max(0.0, connection.query_progress())
                progress(int(source.size * percent / 100), source.size)
        except BaseException:
            connection.interrupt()
            raise
    execution.result()


def _selection(names: dict[str, str], text_roles: Collection[str]) -> str:
    """SQL for the column of each role, with text trimmed."""
    selected = []
    for role, name in names.items():
        # Most values are printable ASCII without spaces; testing for that is far faster than trimming.
        trimmed = f"nullif(trim({name}, {literal(_WHITESPACE)}), '')"
        clean = f"CASE WHEN regexp_full_match({name}, '[!-~]+') THEN {name} ELSE {trimmed} END"
        selected.append(f'{clean if role in text_roles else name} AS "{role}"')
    return ", ".join(selected)


def _insert(connection: Any, source: Source, batches: Iterator[tuple[Any, int]], progress: Progress) -> None:
    """Fill the table `raw` from pyarrow tables, each with the number of bytes read so far."""
    duckdb, into = optional_package("duckdb"), "CREATE TABLE raw AS"
    names = {role: f'"{role}"' for role in source.columns}
    for table, bytes_read in batches:
        try:
            connection.register("batch", table)
            types = column_types(connection, "batch")
            selection = _selection(names, [role for role in names if types[role] == "VARCHAR"])
            connection.execute(f"{into} SELECT {selection} FROM batch")
        except (duckdb.NotImplementedException, duckdb.InvalidInputException) as error:
            raise unreadable(source.path, error) from None
        connection.unregister("batch")
        into = "INSERT INTO raw"
        progress(min(bytes_read, source.size), source.size)


def _text_batches(source: Source, block: int) -> Iterator[tuple[Any, int]]:
    """Tables of about `block` bytes of CSV or JSON lines; the last one is empty."""
    arrow, first_row = optional_package("pyarrow"), 1
    rows: list[list[str | None]] = [[]]
    with source.path.open("rb") as file:
        stream = gzip.GzipFile(fileobj=file) if source.gzipped else file
        # Bytes that are not UTF-8 become surrogates, which pyarrow refuses; then the row is known.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        records = (_json_records if source.format == "json" else _csv_records)(source, text)
        while rows:
            start, rows = stream.tell(), list(islice(records, _ROWS_AT_ONCE))
            while stream.tell() - start < block and (more := list(islice(records, _ROWS_AT_ONCE))):
                rows += more
            columns = {role: [row[position] for row in rows] for role, position in source.columns.items()}
            try:
                table = arrow.table({role: arrow.array(column, arrow.string()) for role, column in columns.items()})
            except UnicodeEncodeError:
                texts = ("".join(filter(None, values)) for values in zip(*columns.values()))
                wrong = (index for index, text in enumerate(texts) if _SURROGATE.search(text))
                raise _not_utf8(source, first_row + next(wrong)) from None
            yield table, file.tell()
            first_row += len(rows)


def _csv_records(source: Source, text: io.TextIOWrapper) -> Iterator[list[str | None]]:
    """Read records as Python's csv module does, without the header and blank lines; all have the same columns."""
    # A delimiter of two characters is read as one, with an empty column between any two.
    step, row = len(source.delimiter), 0 if source.has_header else 1
    width = (len(source.names) - 1) * step + 1
    try:
        for record in csv.reader(text, delimiter=source.delimiter[0], strict=True):
            if not record:
                continue
            if len(record) != width or (step == 2 and any(record[1::step])):
                what = f"row {row:,} has {-(-len(record) // step)} columns; the first line has {len(source.names)}"
                raise bad_file(source.path, what, "repair that row, or set --delimiter")
            if row:
                yield [*record[::step]]
            row += 1
    except csv.Error as error:
        what = f"row {row:,} is not valid CSV: {error}"
        raise bad_file(source.path, what, "look for a quote without its pair") from None
    except READ_ERRORS as error:
        raise unreadable(source.path, error) from None


def _json_records(source: Source, text: io.TextIOWrapper) -> Iterator[list[str | None]]:
    """Read the values of JSON objects as text; numbers keep their digits, and blank lines are skipped."""
    row = 1
    try:
        for line in filter(str.strip, text):
            record = json.loads(line, parse_int=str, parse_float=str)
            if not isinstance(record, dict):
                raise ValueError("not an object")
            values = [record.get(name) for name in source.names]
            yield [value if isinstance(value, str | None) else json.dumps(value) for value in values]
            row += 1
    except ValueError as error:
        what = f"row {row:,} is not a JSON object: {error}"
        raise bad_file(source.path, what, "write one object on each line") from None
    except READ_ERRORS as error:
        raise unreadable(source.path, error) from None


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
                columns = {role: _plain(batch.column(name), source, first_row) for role, name in names.items()}
                first_row += len(batch)
                yield arrow.table(columns), source.size * (first_row - 1) // max(1, file.metadata.num_rows)
    except (arrow.ArrowException, OSError) as error:
        raise unreadable(source.path, error) from None


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
            raise _not_utf8(source, first_row + next(wrong)) from None
    return column


def _not_utf8(source: Source, row: int) -> DataError:
    return bad_file(source.path, f"row {row:,} is not UTF-8 text", "convert it to UTF-8")
