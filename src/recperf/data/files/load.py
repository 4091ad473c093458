"""Load the columns of a user's file into the DuckDB table `raw`, one column per role, rows in the order of the file.

DuckDB reads a regular CSV file at once; other text comes from Python (`text_rows.py`), which knows every bad row by its
number. Text in `raw` has no whitespace around it, and empty text is NULL. A column of numbers that are all written in
the shortest way is stored as numbers, which mean the same as their text.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

from ..tables import Table, in_blocks, optional_package, pyarrow
from .file import Source, bad_file, unreadable
from .formats import COLUMNAR, TEXT, ColumnarFormat, csv_rows, csv_table
from .source import inspect, require_distinct
from .text_rows import NOT_UTF8, BadRows, read_lines, regular_csv
from .values import column_types, fetch_row, is_short_number, open_database, short_number, stripped

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that have been read, and the bytes of the whole file."""
_SCORED_MEMORY = 512 << 20
_NUMBERS: Final[tuple[Number, ...]] = ("BIGINT", "DOUBLE")
_FIRST_ROWS, _AT_ONCE = 1000, 1 << 16
_SURROGATE = re.compile("[\ud800-\udfff]")


Part = tuple[str, int]
"""Rows of a file: a table of DuckDB with the columns f0, f1 and so on, one for each role; and the bytes of the file
read so far."""
Number = Literal["BIGINT", "DOUBLE"]
"""What a column of numbers may be stored as: whole ones, or any."""


def load_file(
    connection: Any,
    source: Source,
    progress: Progress,
    bad: BadRows,
    table: str = "raw",
    numbers: Mapping[str, Number] | None = None,
) -> None:
    """Create a table from the file without its bad rows. `numbers` says which columns of text may become numbers."""
    if not (source.delimited and _load_regular(connection, source, table, numbers or {})):
        _load_parts(connection, source, progress, bad, table)
    source.require_unchanged()
    progress(source.size, source.size)


def _load_regular(connection: Any, source: Source, table: str, numbers: Mapping[str, Number]) -> bool:
    """Create a table from a file that DuckDB reads at once; False if it has bad rows or Python has to read it."""
    duckdb, form = optional_package("duckdb"), regular_csv(source)
    if form is None:
        return False
    rows, columns = csv_table(connection, source, form), {role: f"f{at}" for at, role in enumerate(source.columns)}
    if not form.trimmed:
        rows = f"(SELECT {', '.join(f'{stripped(column)} AS {column}' for column in columns.values())} FROM {rows})"
    try:
        kinds = _kinds(connection, rows, columns, numbers)
        try:
            connection.execute(f"CREATE TABLE {table} AS {_selection(rows, columns, kinds)}")
        except duckdb.ConversionException:
            # A column is not of numbers after all.
            connection.execute(f"CREATE TABLE {table} AS {_selection(rows, columns, {})}")
    except duckdb.InvalidInputException:
        return False
    if fetch_row(connection, f"SELECT count(*) FROM {table}")[0] == form.rows:
        return True
    connection.execute(f"DROP TABLE {table}")
    return False


def _selection(rows: str, columns: Mapping[str, str], kinds: Mapping[str, Number]) -> str:
    """The query for columns by their roles, some as numbers."""
    tried = ["*", *(f"TRY_CAST({columns[role]} AS {kind}) AS n_{columns[role]}" for role, kind in kinds.items())]
    values = {**columns} | {
        role: short_number(columns[role], f"n_{columns[role]}", kind) for role, kind in kinds.items()
    }
    selected = ", ".join(f'{value} AS "{role}"' for role, value in values.items())
    return f"SELECT {selected} FROM (SELECT {', '.join(tried)} FROM {rows})"


def _kinds(connection: Any, rows: str, columns: Mapping[str, str], numbers: Mapping[str, Number]) -> dict[str, Number]:
    """What the first rows let columns be stored as."""
    allowed = {role: _NUMBERS[: 1 + (most == "DOUBLE")] for role, most in numbers.items() if role in columns}
    asked = [(role, kind) for role, kinds in allowed.items() for kind in kinds]
    if not asked:
        return {}
    tried = (is_short_number(columns[role], f"TRY_CAST({columns[role]} AS {kind})", kind) for role, kind in asked)
    tests = (f"bool_and({test})" for test in tried)
    answers = fetch_row(connection, f"SELECT {', '.join(tests)} FROM (FROM {rows} LIMIT {_FIRST_ROWS})")
    # Of two that hold the narrower one, which comes first.
    return {role: kind for (role, kind), holds in reversed([*zip(asked, answers)]) if holds}


def _load_parts(connection: Any, source: Source, progress: Progress, bad: BadRows, table: str) -> None:
    duckdb, into = optional_package("duckdb"), f"CREATE TABLE {table} AS"
    columnar = COLUMNAR.get(source.format)
    if columnar is None:
        texts = ", ".join(f'"{role}" VARCHAR' for role in source.columns)
        connection.execute(f"CREATE TABLE {table} ({texts})")
        into = f"INSERT INTO {table}"
    for rows, bytes_read in _parts(connection, source, bad):
        try:
            kinds = column_types(connection, rows) if columnar else {}
            columns = {role: f"f{at}" for at, role in enumerate(source.columns)}
            for role, column in columns.items():
                if kinds.get(column, "VARCHAR") == "VARCHAR":
                    columns[role] = stripped(column)
            selected = ", ".join(f'{value} AS "{role}"' for role, value in columns.items())
            connection.execute(f"{into} SELECT {selected} FROM {rows}")
        except (duckdb.NotImplementedException, duckdb.InvalidInputException) as error:
            raise unreadable(source.path, error) from None
        into = f"INSERT INTO {table}"
        progress(min(bytes_read, source.size), source.size)


class RowFile:
    """A CSV, JSON-lines (either may be in gzip) or Parquet file of a user, whose first line names its columns.

    Columns of text files are text.
    """

    def __init__(self, path: Path) -> None:
        source = inspect(path, {}, header="yes")
        require_distinct(source.path, source.names)
        self.source: Source = replace(source, columns={name: at for at, name in enumerate(source.names)})

    @property
    def names(self) -> list[str]:
        return self.source.names

    def rows(self) -> int | None:
        """How many rows there are, if that is known without reading them."""
        columnar = COLUMNAR.get(self.source.format)
        if columnar is None:
            return None
        with columnar.open(self.source.path) as (_, rows, _):
            return rows

    def blocks(self, names: Sequence[str], size: int) -> Iterator[Table]:
        """Tables of `size` rows with these columns, the last one shorter."""
        source = replace(self.source, columns={name: self.source.columns[name] for name in names})
        columnar = COLUMNAR.get(source.format)
        typed = (table for table, _ in _column_batches(source, columnar)) if columnar else None
        tables = self._text_tables(source) if typed is None else typed
        return in_blocks(tables, size)

    def _text_tables(self, source: Source) -> Iterator[Table]:
        names = list(source.columns)
        with (
            tempfile.TemporaryDirectory(prefix="recperf-rows-") as folder,
            open_database(Path(folder) / "rows", memory=_SCORED_MEMORY) as connection,
        ):
            form, read = regular_csv(source) if source.delimited else None, 0
            if form is not None:
                # If DuckDB meets a bad row all the same, Python names it.
                with suppress(optional_package("duckdb").InvalidInputException, OSError, ValueError):
                    for batch in connection.sql(f"FROM {csv_table(connection, source, form)}").to_arrow_reader(
                        _AT_ONCE
                    ):
                        # A user's names never become SQL.
                        yield pyarrow().Table.from_batches([batch]).rename_columns(names)
                        read += len(batch)
                if read == form.rows:
                    return
            for part, _ in _parts(connection, source, BadRows(source.path)):
                table = connection.sql(f"FROM {part}").to_arrow_table().rename_columns(names)
                yield table.slice(read)
                read -= min(read, len(table))


def _parts(connection: Any, source: Source, bad: BadRows) -> Iterator[Part]:
    """Parts of the file as tables of DuckDB; a part is gone when the next one is asked for."""
    if columnar := COLUMNAR.get(source.format):
        for table, bytes_read in _column_batches(source, columnar):
            connection.register("batch", table.rename_columns([f"f{at}" for at in range(len(source.columns))]))
            yield "batch", bytes_read
            connection.unregister("batch")
        return
    text = TEXT[source.format]
    if text.rows is None:
        yield from csv_rows(connection, source, bad)
    else:
        for block in read_lines(source, bad):
            yield text.rows(connection, source, block, bad), block.bytes_read
    connection.unregister("batch")


def _column_batches(source: Source, columnar: ColumnarFormat) -> Iterator[tuple[Any, int]]:
    arrow, first_row = pyarrow(), 1
    names = {role: source.names[position] for role, position in source.columns.items()}
    try:
        with columnar.open(source.path) as (schema, rows, batches):
            # An empty batch first: a file without rows has columns too.
            empty = arrow.RecordBatch.from_pylist([], schema=schema)
            for batch in chain([empty], batches(list(names.values()))):
                columns = {role: _plain(batch.column(name), source, first_row) for role, name in names.items()}
                first_row += len(batch)
                yield arrow.table(columns), source.size * (first_row - 1) // max(1, rows)
    except (arrow.ArrowException, OSError) as error:
        raise unreadable(source.path, error) from None


def _plain(column: Any, source: Source, first_row: int) -> Any:
    """Convert the types that DuckDB does not read as they are meant."""
    arrow = pyarrow()
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
            what, fix = NOT_UTF8
            raise bad_file(source.path, f"row {first_row + next(wrong):,}{what}", fix) from None
    return column
