"""The formats of a user's file, each declared once: how it begins, and how its columns and rows are read.

To add a format, of text or of columns with types, write it here.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..tables import pyarrow
from .file import LONGEST_LINE, Source, bad_file
from .recognise import FIRST_ROWS
from .text_rows import BadRows, RegularCsv, TextBlock, read_records
from .values import MISSING, fetch_row, literal

LIST_MARK = "|"
"""What separates the values of a list in text."""
_PAIRS = 1 << 16
ROWS = 1 << 16
"""Rows of a Parquet file that are read at a time."""


Opened = tuple[Any, int, Callable[[list[str]], Iterator[Any]]]
"""The schema, the number of rows, and a function that returns batches of some columns."""


@dataclass(frozen=True, kw_only=True)
class ColumnarFormat:
    name: str
    title: str
    magic: bytes
    """The first bytes of a file."""
    endings: tuple[str, ...]
    open: Callable[[Path], AbstractContextManager[Opened]]


@contextmanager
def _parquet(path: Path) -> Iterator[Opened]:
    # pyarrow verifies the checksums of pages, DuckDB does not.
    with pyarrow(".parquet").ParquetFile(str(path), buffer_size=1 << 20, page_checksum_verification=True) as file:

        def batches(names: list[str]) -> Iterator[Any]:
            return iter(file.iter_batches(ROWS, columns=names, use_threads=False))

        yield file.schema_arrow, file.metadata.num_rows, batches


COLUMNAR = {
    one.name: one
    for one in (
        ColumnarFormat(name="parquet", title="Parquet", magic=b"PAR1", endings=(".parquet", ".pq"), open=_parquet),
    )
}
LONGEST_MAGIC = max(len(one.magic) for one in COLUMNAR.values())


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    name: str
    begins: Callable[[Path, str], bool]
    """Whether a file with this first line has the format, where no option says so; the first that has it is chosen."""
    names: Callable[[Path, bytes, str], list[str]] = lambda path, sample, delimiter: []
    """The names of the columns, or the fields of the first record, from the first bytes of a file."""
    first: Callable[[bytes, list[str], str], list[list[Any]]] = lambda sample, names, delimiter: []
    """The values of the first rows behind a header, from the same bytes; rows that cannot be read are left out."""
    delimited: bool = False
    """Whether rows are fields with a delimiter between them, which may be in quotes."""
    rows: Callable[[Any, Source, TextBlock, BadRows], str] | None = None
    """The rows of a block of lines as a table of DuckDB with the columns f0, f1 and so on for the roles; of a delimited
    format none."""
    roles: tuple[str, ...] = ()
    """What its columns are, where that is fixed."""


def _csv_names(path: Path, sample: bytes, delimiter: str) -> list[str]:
    try:
        text = io.StringIO(sample.decode(errors="replace"), newline="")
        fields = next(csv.reader(text, delimiter=delimiter[0], strict=True))
    except csv.Error as error:
        raise bad_file(path, f"the first line cannot be read: {error}", "begin with a header or a row") from None
    return [field.strip() for field in fields[:: len(delimiter)]]


def _csv_first(sample: bytes, names: list[str], delimiter: str) -> list[list[Any]]:
    text, first = sample.decode(errors="replace"), list[list[str]]()
    # The last line of a sample may be cut.
    rows = csv.reader(io.StringIO(text[: text.rfind("\n") + 1] or text, newline=""), delimiter=delimiter[0])
    with suppress(csv.Error):
        first += (row[:: len(delimiter)] for row in islice(rows, 1, FIRST_ROWS))
    return [row for row in first if len(row) == len(names)]


def csv_table(connection: Any, source: Source, form: RegularCsv) -> str:
    """A regular file as a table of DuckDB with the columns f0, f1 and so on for the roles."""
    # A user's path could be a pattern, or the address of a host; and DuckDB may remember the content of a path.
    folder = Path(fetch_row(connection, "SELECT current_setting('temp_directory')")[0])
    path = folder / f"{'-'.join(map(str, source.state))}.csv"
    if not path.is_symlink():
        path.symlink_to(source.path.absolute())
    columns = ", ".join(f"c{at}: 'VARCHAR'" for at in range(len(source.names)))
    selected = ", ".join(f"c{at} AS f{position}" for position, at in enumerate(source.columns.values()))
    quote, line_end = '"' if form.quoted else "", r"\r\n" if form.returns else r"\n"
    return (
        f"(SELECT {selected} FROM read_csv({literal(str(path))}, columns = {{{columns}}}, auto_detect = false, "
        f"header = {source.has_header}, delim = {literal(source.delimiter)}, quote = '{quote}', escape = '{quote}', "
        f"comment = '', new_line = '{line_end}', strict_mode = true, parallel = {not form.broken}, "
        f"compression = '{'gzip' if source.gzipped else 'none'}', max_line_size = {2 * LONGEST_LINE}, "
        f"buffer_size = {4 * LONGEST_LINE}))"
    )


def csv_rows(connection: Any, source: Source, bad: BadRows) -> Iterator[tuple[str, int]]:
    """The same of any file as Python reads it, in parts; each with the bytes of the file that have been read."""
    arrow = pyarrow()
    for rows, bytes_read in read_records(source, bad):
        columns = {
            f"f{position}": arrow.array([row[at] or None for row in rows], arrow.string())
            for position, at in enumerate(source.columns.values())
        }
        connection.register("batch", arrow.table(columns))
        yield "batch", bytes_read


def _begins_json(path: Path, first_line: str) -> bool:
    if re.match(r"\s*\[\s*(\{|$)", first_line):
        raise bad_file(path, "this is one JSON array", "write one object on each line, as jq -c '.[]' does")
    return first_line.lstrip().startswith("{")


def _json_names(path: Path, sample: bytes, delimiter: str) -> list[str]:
    try:
        return list(json.loads(sample.splitlines()[0].decode()))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise bad_file(path, f"row 1 is not a JSON object: {why}", "write one object on each line") from None


def _json_first(sample: bytes, names: list[str], delimiter: str) -> list[list[Any]]:
    first: list[list[Any]] = []
    for line in sample.split(b"\n")[:FIRST_ROWS]:
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
            first += [[value.get(name) for name in names]] if isinstance(value, dict) else []
    return first


def _json_rows(connection: Any, source: Source, block: TextBlock, bad: BadRows) -> str:
    """Values of objects as text."""
    arrow = pyarrow()
    lines = arrow.array(block.lines, arrow.string())
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
    fields = f"json_extract_string(line, [{', '.join(map(literal, pointers))}]) AS fields"
    rows = f'SELECT line, "row" FROM batch WHERE {filled} AND {valid} AND NOT {nul}'
    return f'(SELECT {", ".join(values)} FROM (SELECT line, "row", {fields} FROM ({rows})) ORDER BY "row")'


def _sequence_rows(connection: Any, source: Source, block: TextBlock, bad: BadRows) -> str:
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

    for row, line in zip(block.numbers_N.tolist(), block.lines):
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


TEXT = {
    one.name: one
    for one in (
        TextFormat(name="json", begins=_begins_json, names=_json_names, first=_json_first, rows=_json_rows),
        TextFormat(
            name="csv",
            begins=lambda path, line: True,
            names=_csv_names,
            first=_csv_first,
            delimited=True,
        ),
        TextFormat(name="sequences", begins=lambda path, line: False, rows=_sequence_rows, roles=("user", "item")),
    )
}


def text_format(path: Path, first_line: str, *, delimited: bool, sequences: bool) -> TextFormat:
    """The format of a text file; an option for the delimiter, or for sequences, says what it must be."""
    if sequences:
        return next(one for one in TEXT.values() if one.roles)
    return next(one for one in TEXT.values() if (one.delimited if delimited else one.begins(path, first_line)))
