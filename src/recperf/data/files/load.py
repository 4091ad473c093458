"""Load the columns of a user's file into the DuckDB table `raw`, one column per role, rows in the order of the file.

Text is read in blocks of whole rows (`text_rows.py`), so that every bad row is known by its number; `formats.py` says
how the rows of a block are read. Text in `raw` has no whitespace around it, and empty text is NULL.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..tables import Table, in_blocks, optional_package, pyarrow
from .file import Source, bad_file, unreadable
from .formats import COLUMNAR, TEXT, ColumnarFormat
from .source import inspect, require_distinct
from .text_rows import NOT_UTF8, BadRows, read_blocks
from .values import column_types, open_database, stripped

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that have been read, and the bytes of the whole file."""
_SCORED_MEMORY = 512 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")


Part = tuple[str, int, bool]
"""Rows of a file: a table of DuckDB with the columns f0, f1 and so on, one for each role; the bytes of the file read so
far; and whether text has no whitespace around it, and none is empty."""


def load_file(connection: Any, source: Source, progress: Progress, bad: BadRows, table: str = "raw") -> None:
    """Create a table from the file without its bad rows."""
    duckdb, into = optional_package("duckdb"), f"CREATE TABLE {table} AS"
    columnar = COLUMNAR.get(source.format)
    if columnar is None:
        texts = ", ".join(f'"{role}" VARCHAR' for role in source.columns)
        connection.execute(f"CREATE TABLE {table} ({texts})")
        into = f"INSERT INTO {table}"
    for rows, bytes_read, trimmed in _parts(connection, source, bad):
        try:
            kinds = column_types(connection, rows) if columnar else {}
            columns = {role: f"f{at}" for at, role in enumerate(source.columns)}
            for role, column in columns.items():
                if not trimmed and kinds.get(column, "VARCHAR") == "VARCHAR":
                    columns[role] = stripped(column)
            selected = ", ".join(f'{value} AS "{role}"' for role, value in columns.items())
            connection.execute(f"{into} SELECT {selected} FROM {rows}")
        except (duckdb.NotImplementedException, duckdb.InvalidInputException) as error:
            raise unreadable(source.path, error) from None
        into = f"INSERT INTO {table}"
        progress(min(bytes_read, source.size), source.size)
    source.require_unchanged()
    progress(source.size, source.size)


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
        with (
            tempfile.TemporaryDirectory(prefix="recperf-rows-") as folder,
            open_database(Path(folder) / "rows", memory=_SCORED_MEMORY) as connection,
        ):
            for rows, *_ in _parts(connection, source, BadRows(source.path)):
                # A user's names never become SQL.
                yield connection.sql(f"FROM {rows}").to_arrow_table().rename_columns(list(source.columns))


def _parts(connection: Any, source: Source, bad: BadRows) -> Iterator[Part]:
    """Parts of the file as tables of DuckDB; a part is gone when the next one is asked for."""
    if columnar := COLUMNAR.get(source.format):
        for table, bytes_read in _column_batches(source, columnar):
            connection.register("batch", table.rename_columns([f"f{at}" for at in range(len(source.columns))]))
            yield "batch", bytes_read, False
            connection.unregister("batch")
        return
    text = TEXT[source.format]
    with closing(read_blocks(source, bad)) as blocks:
        for number, block in enumerate(blocks):
            rows = text.rows(connection, source, block, bad, number)
            yield rows, block.bytes_read, source.delimited and block.trimmed
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
