"""Load the columns of a user's file into the DuckDB table `raw`, one column per role, rows in the order of the file.

Text is read in blocks of whole rows (`text_rows.py`), so that every bad row is known by its number. DuckDB reads the
fields of a block of CSV or JSON lines. pyarrow reads Parquet, because it verifies checksums of pages and DuckDB does
not. Text in `raw` has no whitespace around it, and empty text is NULL.
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

import numpy as np

from ..rows import Table, in_blocks, optional_package, pyarrow
from .columnar import ColumnarFormat
from .source import BOM, LONGEST_LINE, Source, bad_file, inspect, require_distinct, unreadable
from .text_rows import NOT_UTF8, BadRows, TextBlock, read_blocks
from .values import MISSING, column_types, fetch_row, literal, open_database, stripped

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that have been read, and the bytes of the whole file."""
LIST_ROLE, LIST_MARK = "genres", "|"
"""The role whose values may be lists, and what is put between the values of one."""
_PAIRS = 1 << 16
_SCORED_MEMORY = 512 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")


Part = tuple[str, int, bool]
"""Rows of a file: a table of DuckDB with the columns f0, f1 and so on, one for each role; the bytes of the file read so
far; and whether text has no whitespace around it, and none is empty."""


def load_file(connection: Any, source: Source, progress: Progress, bad: BadRows, table: str = "raw") -> None:
    """Create a table from the file without its bad rows."""
    duckdb, into = optional_package("duckdb"), f"CREATE TABLE {table} AS"
    if source.columnar is None:
        texts = ", ".join(f'"{role}" VARCHAR' for role in source.columns)
        connection.execute(f"CREATE TABLE {table} ({texts})")
        into = f"INSERT INTO {table}"
    for rows, bytes_read, trimmed in _parts(connection, source, bad):
        try:
            kinds = column_types(connection, rows) if source.columnar else {}
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
        if self.source.columnar is None:
            return None
        with self.source.columnar.open(self.source.path) as (_, rows, _):
            return rows

    def blocks(self, names: Sequence[str], size: int) -> Iterator[Table]:
        """Tables of `size` rows with these columns, the last one shorter."""
        source = replace(self.source, columns={name: self.source.columns[name] for name in names})
        typed = (table for table, _ in _column_batches(source, source.columnar)) if source.columnar else None
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
    if source.columnar is not None:
        for table, bytes_read in _column_batches(source, source.columnar):
            connection.register("batch", table.rename_columns([f"f{at}" for at in range(len(source.columns))]))
            yield "batch", bytes_read, False
            connection.unregister("batch")
        return
    read = {"csv": _csv_part, "json": _json_part, "sequences": _sequence_part}[source.format]
    with closing(read_blocks(source, bad)) as blocks:
        for number, block in enumerate(blocks):
            rows = read(connection, source, block, bad, number)
            yield rows, block.bytes_read, source.format == "csv" and block.trimmed
    connection.unregister("batch")


def _csv_part(connection: Any, source: Source, block: TextBlock, bad: BadRows, number: int) -> str:
    # Each block has a file of its own: DuckDB may remember the content of a file by its name.
    folder = Path(fetch_row(connection, "SELECT current_setting('temp_directory')")[0])
    inode, *_ = source.state
    (folder / f"{inode}-{number - 1}.csv").unlink(missing_ok=True)
    path = folder / f"{inode}-{number}.csv"
    # DuckDB removes a byte order mark, which could be part of the first field.
    path.write_bytes(BOM + block.content)
    columns = ", ".join(f"c{at}: 'VARCHAR'" for at in range(len(source.names)))
    selected = ", ".join(f"c{at} AS f{place}" for place, at in enumerate(source.columns.values()))
    quote = '"' if block.quoted else ""
    return (
        f"(SELECT {selected} FROM read_csv({literal(str(path))}, columns = {{{columns}}}, auto_detect = false, "
        f"header = false, delim = {literal(source.delimiter)}, quote = '{quote}', escape = '{quote}', comment = '', "
        f"new_line = '\\n', strict_mode = true, max_line_size = {2 * LONGEST_LINE}, "
        f"buffer_size = {max(2 * LONGEST_LINE, len(block.content) + 4)}))"
    )


def _json_part(connection: Any, source: Source, block: TextBlock, bad: BadRows, number: int) -> str:
    """Values of objects as text; an array of the list role is joined."""
    arrow = pyarrow()
    offsets = np.append(0, block.ends_N).astype(np.int32)
    lines = arrow.Array.from_buffers(
        arrow.string(), len(block.ends_N), [None, arrow.py_buffer(offsets), arrow.py_buffer(block.content)]
    )
    connection.register("batch", arrow.table({"line": lines, "row": block.numbers_N}))
    filled = "trim(line, e' \\t\\r\\n') <> ''"
    valid = "CASE WHEN json_valid(line) THEN json_type(line) = 'OBJECT' ELSE false END"
    nul = r"contains(line, '\u0000')"
    query = f'SELECT "row", {valid} FROM batch WHERE {filled} AND (NOT {valid} OR {nul})'
    for row, is_valid in connection.execute(f"{query} ORDER BY 1 LIMIT {bad.room + 1}").fetchall():
        what = " has a NUL byte" if is_valid else " is not a JSON object"
        bad.add(row, what, "write one object on each line, without NUL characters")
    pointers = ["/" + source.names[at].replace("~", "~0").replace("/", "~1") for at in source.columns.values()]
    values = [f"fields[{at + 1}] AS f{at}" for at in range(len(source.columns))]
    if LIST_ROLE in source.columns:
        at = list(source.columns).index(LIST_ROLE)
        joined = f"array_to_string(from_json(fields[{at + 1}], '[\"VARCHAR\"]'), '{LIST_MARK}')"
        is_list = f"json_type(line, {literal(pointers[at])}) = 'ARRAY'"
        values[at] = f"CASE WHEN {is_list} THEN {joined} ELSE fields[{at + 1}] END AS f{at}"
    fields = f"json_extract_string(line, [{', '.join(map(literal, pointers))}]) AS fields"
    rows = f'SELECT line, "row" FROM batch WHERE {filled} AND {valid} AND NOT {nul}'
    return f'(SELECT {", ".join(values)} FROM (SELECT line, "row", {fields} FROM ({rows})) ORDER BY "row")'


def _sequence_part(connection: Any, source: Source, block: TextBlock, bad: BadRows, number: int) -> str:
    """Lines of a user and items, separated by whitespace or commas, as a pair of user and item for each item."""
    arrow = pyarrow()
    chunks: list[Any] = []
    users: list[str] = []
    items: list[str] = []

    def flush() -> None:
        """Text of Python takes many times the bytes of arrow's."""
        chunks.append(arrow.table([arrow.array(one, arrow.string()) for one in (users, items)], ["f0", "f1"]))
        users.clear()
        items.clear()

    for row, line in zip(block.numbers_N.tolist(), block.content.decode().split("\n")):
        fields = line.replace(",", " ").split()
        missing = next((field for field in fields if field in MISSING), None)
        if missing is not None or len(fields) == 1:
            what = ": a user without items" if missing is None else f": {missing!r} stands for a missing value"
            bad.add(row, what, "write a user and at least one item on each line")
            continue
        users += [fields[0]] * (len(fields) - 1)
        items += fields[1:]
        if len(items) >= _PAIRS:
            flush()
    flush()
    connection.register("batch", arrow.concat_tables(chunks))
    return "batch"


def _column_batches(source: Source, columnar: ColumnarFormat) -> Iterator[tuple[Any, int]]:
    arrow, first_row = pyarrow(), 1
    names = {role: source.names[position] for role, position in source.columns.items()}
    try:
        with columnar.open(source.path) as (schema, rows, batches):
            # An empty batch first: a file without rows has columns too.
            empty = arrow.RecordBatch.from_pylist([], schema=schema)
            for batch in chain([empty], batches(list(names.values()))):
                columns = {role: _plain(batch.column(name), role, source, first_row) for role, name in names.items()}
                first_row += len(batch)
                yield arrow.table(columns), source.size * (first_row - 1) // max(1, rows)
    except (arrow.ArrowException, OSError) as error:
        raise unreadable(source.path, error) from None


def _plain(column: Any, role: str, source: Source, first_row: int) -> Any:
    """Convert the types that DuckDB does not read as they are meant, and lists of the role that may have several."""
    arrow = pyarrow()
    types = arrow.types
    if role == LIST_ROLE and (types.is_list(column.type) or types.is_large_list(column.type)):
        return pyarrow(".compute").binary_join(column.cast(arrow.list_(arrow.string())), LIST_MARK)
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
