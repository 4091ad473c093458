"""Inspect a user's file: its format, its delimiter, and which of its columns serve which role.

The content decides the format, not the file's name. The first record of a CSV file names the columns, or the first
object of JSON lines.
"""

from __future__ import annotations

import gzip
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ...errors import DataError, UsageError, closest
from ...files import open_dataset_file
from ..tables import pyarrow
from .file import BOM, LONGEST_LINE, READ_ERRORS, Source, bad_file, state_of, unreadable
from .formats import COLUMNAR, LONGEST_MAGIC, ColumnarFormat, text_format
from .recognise import FIRST_ROWS, columns_of_times, columns_within, recognised_columns

Header = Literal["auto", "yes", "no"]
_DELIMITERS = ("\t", ",", ";", "|")
_SAMPLE_BYTES = 1 << 20
_TYPE = re.compile("(?<=.):(token|float)(_seq)?$")
"""What RecBole's files write behind a column's name."""
_MOST_ITEM_COLUMNS = 100
"""Columns of events that may belong to items without an option; each takes queries of its own."""
_MOST_SHOWN = 20
"""Names of columns in a message."""


def _begin(path: Path) -> tuple[bytes, tuple[int, int, int]]:
    """The first bytes of a file, and its state."""
    try:
        with open_dataset_file(path) as file:
            magic, state = file.read(LONGEST_MAGIC), state_of(os.fstat(file.fileno()))
    except OSError as error:
        raise bad_file(path, f"the file cannot be opened: {error.strerror}", "check the path") from None
    if not state[1]:
        raise bad_file(path, "the file is empty", "name a file with rows")
    return magic, state


def _open(path: Path, gzipped: bool) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path) if gzipped else open_dataset_file(path)


def inspect(
    path: Path,
    columns: Mapping[str, str],
    *,
    delimiter: str | None = None,
    header: Header = "auto",
    recognised: Mapping[str, Sequence[str]] | None = None,
    sequences: bool = False,
    item_columns: bool = False,
) -> Source:
    """Find the format of a file and its columns. `columns` maps each role to a column's name or number; `recognised`
    has the usual names of the columns of other roles, which need not exist. A file of `sequences` has a user and items
    on each line, and the columns user and item. With `item_columns` other columns that may belong to the item have the
    roles c0, c1 and so on."""
    path = path.expanduser()
    magic, state = _begin(path)
    source = Source(path=path, size=state[1], state=state, gzipped=magic[:2] == b"\x1f\x8b")
    for columnar in COLUMNAR.values():
        if magic.startswith(columnar.magic):
            names = _column_names(path, columnar)
            source = replace(source, format=columnar.name, names=names)
            rows = partial(_column_rows, path, columnar, names)
            return _with_columns(source, columns, recognised or {}, rows, item_columns=item_columns)
        if path.suffix in columnar.endings:
            raise bad_file(path, f"this is not a {columnar.title} file", "name it .csv if it is text")
    try:
        with _open(path, source.gzipped) as file:
            sample = file.read(_SAMPLE_BYTES).removeprefix(BOM)
    except READ_ERRORS as error:
        raise unreadable(path, error) from None
    first_line = _first_line(path, sample)
    text = text_format(path, first_line, delimited=delimiter is not None, sequences=sequences)
    if text.roles:
        positions = {role: at for at, role in enumerate(text.roles)}
        return replace(source, format=text.name, names=list(text.roles), columns=positions, has_header=header == "yes")
    delimiter = delimiter or _guess_delimiter(path, first_line)
    names = text.names(path, sample, delimiter)
    by_number = bool(columns) and all(column.isdecimal() for column in columns.values())
    has_header = text.delimited and (header == "yes" or (header == "auto" and not by_number))
    if text.delimited and not (has_header or by_number):
        name = next(column for column in columns.values() if not column.isdecimal())
        what = f"a file without a header has no column {name!r}"
        raise UsageError(what, where={"file": path}, fix=f"give columns by number, 1 to {len(names)}")
    unnamed = text.delimited and not has_header
    source = replace(
        source,
        format=text.name,
        names=[""] * len(names) if unnamed else [_TYPE.sub("", name) for name in names],
        delimited=text.delimited,
        delimiter=delimiter,
        has_header=has_header,
    )
    first = partial(text.first, sample, names, delimiter)
    return _with_columns(source, columns, recognised or {}, list if unnamed else first, item_columns=item_columns)


def _first_line(path: Path, sample: bytes) -> str:
    line = (sample.splitlines() or [b""])[0]
    if b"\0" in line:
        raise bad_file(path, "this is not a text file", "give CSV or JSON lines, in gzip or not, or Parquet")
    if len(line) > LONGEST_LINE:
        commas = max(line.count(mark.encode()) for mark in _DELIMITERS)
        what = f"the first line does not end within {LONGEST_LINE:,} bytes ({commas + 1:,} columns so far)"
        raise bad_file(path, what, "write only the columns to import, and end every line")
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise bad_file(path, "the first line is not UTF-8 text", "convert the file to UTF-8") from None
    if not text.strip():
        raise bad_file(path, "the first line is empty", "begin with a header or a row")
    return text


def _guess_delimiter(path: Path, line: str) -> str:
    if ".tsv" in path.suffixes and "\t" in line:
        return "\t"
    return "::" if "::" in line else max(_DELIMITERS, key=lambda mark: (line.count(mark), mark == ","))


def _column_names(path: Path, columnar: ColumnarFormat) -> list[str]:
    arrow = pyarrow()
    try:
        with columnar.open(path) as (schema, *_):
            return [str(name) for name in schema.names]
    except (arrow.ArrowException, OSError) as error:
        raise unreadable(path, error) from None


def _column_rows(path: Path, columnar: ColumnarFormat, names: list[str]) -> list[list[Any]]:
    """The first values of columns, where the type is a time one of it; of structures None."""
    if repeated_name(names) is not None:
        return []
    arrow = pyarrow()
    try:
        with columnar.open(path) as (schema, rows, batches):
            kinds, types = dict(zip(names, schema.types)), arrow.types
            read = [name for name in names if not (types.is_temporal(kinds[name]) or types.is_struct(kinds[name]))]
            values = next(batches(read)).slice(0, FIRST_ROWS).to_pydict() if rows and read else {}
    except (arrow.ArrowException, OSError) as error:
        raise unreadable(path, error) from None
    for name, kind in kinds.items():
        is_time = types.is_timestamp(kind) or types.is_date(kind)
        values.setdefault(name, [datetime.min if is_time else None] * min(rows, FIRST_ROWS))
    return [list(row) for row in zip(*(values[name] for name in names))]


def _with_columns(
    source: Source,
    columns: Mapping[str, str],
    recognised: Mapping[str, Sequence[str]],
    rows: Callable[[], list[list[Any]]],
    *,
    item_columns: bool,
) -> Source:
    """The source with the column of each role: those that the user named, then those with usual names, and if there is
    no time yet, one with times in the first `rows`; and columns that do not change within an item there."""
    path, names = source.path, source.names
    roles: dict[int, str] = {}
    for role, column in columns.items():
        position = position_of(path, role, column, names)
        if position in roles:
            what = f"column {column!r} is given as {roles[position]} and as {role}"
            raise UsageError(what, where={"file": path}, fix="give each column once")
        roles[position] = role
    for role, usual in recognised.items():
        for position in [position for position in recognised_columns(names, usual) if position not in roles][:1]:
            roles[position] = role
    by_value = []
    if "time" in recognised and "time" not in roles.values():
        by_value = [at for at in columns_of_times(rows()) if at not in roles]
        if len(by_value) > 1:
            first, second, *_ = (names[at] for at in by_value)
            what = f"columns {first!r} and {second!r} both have times, and neither has a usual name for the time"
            raise UsageError(what, where={"file": path}, fix=f"--time {first}, or --time {second}; or --time none")
        roles.update(dict.fromkeys(by_value, "time"))
    item = next((at for at, role in roles.items() if role == "item"), None)
    if item_columns and item is not None:
        counts = Counter(names)
        others = [at for at in columns_within(rows(), item) if at not in roles and counts[names[at]] == 1]
        roles |= {at: f"c{number}" for number, at in enumerate(others[:_MOST_ITEM_COLUMNS])}
    return replace(source, columns={role: at for at, role in roles.items()}, time_by_values=bool(by_value))


def require_role(source: Source, role: str) -> None:
    """Refuse a file without a column for a role that every row needs."""
    if role in source.columns:
        return
    shown = shown_names(source.names)
    repeated = repeated_name(filter(None, source.names))
    if len(source.names) == 1 and len(source.names[0].split()) > 1:
        what = f"the first line is one column: {source.names[0][:60]!r}"
        fix = "--sequences if each line has a user and its items in order, or --delimiter ' '"
    elif all(re.fullmatch(r"[0-9.]*", name) for name in source.names):
        what = "the first line has numbers in place of column names"
        fix = "--user 1 --item 2 --rating 3 --time 4, or --sequences if each line has a user and its items"
    elif repeated is not None:
        what = f"the file has {source.names.count(repeated)} columns named {repeated!r}, and none is clearly the {role}"
        fix = f"--{role} NUMBER of the column, counted from 1"
    else:
        what, fix = f"no column has a usual name for the {role}", f"--{role} COLUMN, the name or the number of one"
    raise DataError(what, where={"file": source.path, "columns": shown}, fix=fix)


def require_distinct(path: Path, names: list[str]) -> None:
    """Refuse a file with several columns of one name."""
    repeated = repeated_name(names)
    if repeated is not None:
        what = f"the file has {names.count(repeated)} columns named {repeated!r}"
        raise bad_file(path, what, "rename one of them in the first line")


def repeated_name(names: Iterable[str]) -> str | None:
    """The first name that several columns have."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def shown_names(names: list[str]) -> str:
    """The names of columns for a message, or their numbers where they have none."""
    more = f" and {len(names) - _MOST_SHOWN:,} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more if any(names) else f"1 to {len(names)}"


def position_of(path: Path, role: str, column: str, names: list[str]) -> int:
    """Returns the position of the column that a user gave for a role by its name or number."""
    if names.count(column) == 1:
        return names.index(column)
    if column in names and column:
        what = f"the file has {names.count(column)} columns named {column!r}"
        raise bad_file(path, what, f"give the {role} by its number")
    if column.isdecimal() and 1 <= int(column) <= len(names):
        return int(column) - 1
    known = shown_names(names)
    guess = closest(column, names)
    what = f"there is no column {column!r} for the {role}; " + (
        f"did you mean {guess!r}?" if guess else f"known: {known}"
    )
    fix = f"--{role.split()[0]} {guess}" if guess else f"give the {role} one of those"
    raise DataError(what, where={"file": path, "columns": known}, fix=fix)
