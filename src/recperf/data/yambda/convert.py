"""Convert the table `raw` to the table `events`: numbered ids, seconds, and whether they are positive.

SQL converts whole columns and gives NULL for a value that does not fit; the first of those is an error that names its
row, its value and what is allowed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import sha256, writing
from ...stop import poll
from ..user_files.load import LIST_MARK
from ..user_files.source import Source
from ..user_files.text_rows import BadRows
from ..user_files.values import (
    MISSING,
    RESTART,
    TIME_UNITS,
    column_types,
    fetch_row,
    is_integer,
    is_text,
    is_time,
    label,
    microseconds,
    number,
    present,
)
from .import_options import ImportOptions, TimeUnit
from .manifest import Originals
from .schema import LAST_SECOND

OPTIONAL_ROLES = ("artist", "album")
ID_ROLES = ("user", "item", *OPTIONAL_ROLES)
POSITIVE_SHARE = 0.8
"""A rating of at least this share of the largest one is positive: 4 of 5."""
_VALUES_SHOWN = 5
"""Values of a label in a message."""
_AT_ONCE = 1 << 16
_INTEGER_ID = r"0|-?[1-9][0-9]{0,17}"
_MACROS = (
    "bounded(x, low, high) AS CASE WHEN x BETWEEN low AND high THEN x END",
    # The operator // rounds towards zero, so times before 1970 are left out first.
    "whole_seconds(x, unit) AS CASE WHEN x >= 0 THEN x // unit END",
)


@dataclass(frozen=True)
class Column:
    """A column of the table `raw`: the role it serves, and its type in DuckDB."""

    role: str
    type: str

    @property
    def name(self) -> str:
        return f'"{self.role}"'


def convert(connection: Any, source: Source, options: ImportOptions, bad: BadRows) -> ImportOptions:
    """Create the table `events`: row, user_id, item_id, seconds, positive, and artist_id, album_id if any.

    Rows that do not fit are left out as far as `bad` allows. Returns the options with the unit of times and the least
    positive rating of the file.
    """
    for macro in _MACROS:
        connection.execute(f"CREATE MACRO {macro}")
    if "genres" in column_types(connection, "raw"):
        _group_genres(connection)
    types = column_types(connection, "raw")
    # In the order in which the faults of one row are reported.
    roles = [role for role in ("user", "item", "time", options.signal, *OPTIONAL_ROLES) if role in types]
    columns = {role: Column(role, types[role]) for role in roles if role is not None}
    if "time" in columns and options.time_unit == "auto":
        options = replace(options, time_unit=_unit(connection, columns["time"]))
    if "rating" in columns and options.positive_from is None:
        largest = fetch_row(connection, f"SELECT max({_number(columns['rating'])}) FROM raw")[0]
        options = replace(options, positive_from=round(POSITIVE_SHARE * (largest or 0.0), 6))
    values = {"seconds": _order(options), "positive": "true"}
    values |= {_target(role, options): _value(connection, column, options) for role, column in columns.items()}
    selected = ", ".join(f"{value} AS {name}" for name, value in values.items())
    is_bad = " OR ".join(_fault(column, options) for column in columns.values())
    connection.execute(f"CREATE TABLE events AS SELECT rowid AS row, {selected}, {is_bad} AS bad FROM raw")
    _leave_out(connection, columns, selected, options, bad)
    if not fetch_row(connection, "SELECT count(*) FROM events")[0]:
        content = "a header and no events" if source.has_header else "no events"
        raise DataError(f"the file has {content}", where={"file": source.path}, fix="name a file with events")
    connection.execute("DROP TABLE raw")
    return options


def _leave_out(
    connection: Any, columns: dict[str, Column], selected: str, options: ImportOptions, bad: BadRows
) -> None:
    """Remove the bad rows of `events`, if they are not too many, and explain the first fault of each."""
    cells = [_fault(column, options) for column in columns.values()]
    cells += [f"{column.name}::VARCHAR" for column in columns.values()]
    rows = f"SELECT row FROM events WHERE bad ORDER BY row LIMIT {bad.room + 1}"
    query = (
        f"SELECT place, {', '.join(cells)} FROM (SELECT *, rowid AS place, {selected} FROM raw WHERE rowid IN ({rows}))"
    )
    for place, *answers in connection.execute(f"{query} ORDER BY place").fetchall():
        faults = zip(columns.values(), answers, answers[len(columns) :])
        column, value = next((column, value) for column, is_fault, value in faults if is_fault)
        what, fix = _explain(column, value, options)
        if column.role == "label" and value is not None and not bad.room:
            query = f"SELECT DISTINCT {column.name}::VARCHAR AS value FROM raw WHERE value IS NOT NULL ORDER BY value"
            values = [value for (value,) in connection.execute(f"{query} LIMIT {_VALUES_SHOWN + 1}").fetchall()]
            what += f"; it has the values {', '.join(values[:_VALUES_SHOWN])}{', ...' * (len(values) > _VALUES_SHOWN)}"
            fix = "--positives VALUE names those that count as positive, --rating takes numbers"
        bad.add_loaded(place, f": {what}", fix)
    connection.execute("DELETE FROM events WHERE bad")


def _group_genres(connection: Any) -> None:
    """Replace the column of genres by an artist, the first of them, and an album, the set of all, where `raw` has none.

    Values are separated by |, or where none has one by semicolons, else commas. There are far fewer
    different texts than rows.
    """
    text = "regexp_replace(value, '^\\[|\\]$', '', 'g')"
    connection.execute('CREATE TABLE texts AS SELECT DISTINCT "genres"::VARCHAR AS value FROM raw')
    separators = ", ".join(f"bool_or(contains({text}, '{mark}'))" for mark in (LIST_MARK, ";"))
    bars, semicolons = fetch_row(connection, f"SELECT {separators} FROM texts")
    mark = LIST_MARK if bars else ";" if semicolons else ","
    # Quotes are those of a list that a program printed.
    trimmed = "lambda genre: trim(genre, ' ''\"')"
    genres = f"list_filter(list_transform(string_split({text}, '{mark}'), {trimmed}), lambda genre: genre <> '')"
    album = f"nullif(array_to_string(list_sort(list_distinct(genres)), '{LIST_MARK}'), '')"
    connection.execute(
        f"CREATE TABLE sets AS SELECT value, genres[1] AS artist, {album} AS album "
        f"FROM (SELECT value, {genres} AS genres FROM texts)"
    )
    missing = [role for role in OPTIONAL_ROLES if role not in column_types(connection, "raw")]
    added = "".join(f", sets.{role}" for role in missing)
    connection.execute(
        f'CREATE TABLE grouped AS SELECT raw.* EXCLUDE ("genres"){added} '
        'FROM raw LEFT JOIN sets ON raw."genres"::VARCHAR = sets.value ORDER BY raw.rowid'
    )
    for statement in ("DROP TABLE raw", "DROP TABLE texts", "DROP TABLE sets", "ALTER TABLE grouped RENAME TO raw"):
        connection.execute(statement)


def _order(options: ImportOptions) -> str:
    """SQL for what stands in for the time where the file has none: the number of the row in the file, or in a random
    order. Sequences of items end together: the last item of every user is the latest."""
    if options.sequences:
        longest = 'SELECT max(events) FROM (SELECT count(*) AS events FROM raw GROUP BY "user")'
        return f'(({longest}) - row_number() OVER (PARTITION BY "user" ORDER BY rowid DESC))::UINTEGER'
    if options.order == "rows":
        return "rowid::UINTEGER"
    key = f"md5_number_lower('{options.seed}:' || rowid)"
    return f"(row_number() OVER (ORDER BY {key}, rowid) - 1)::UINTEGER"


def _unit(connection: Any, column: Column) -> TimeUnit:
    """The unit of times: the coarsest in which the largest one is before 2106; text that is no number is ISO."""
    if is_time(column.type):
        return "iso"
    least, largest = fetch_row(connection, f"SELECT min({_number(column)}), max({_number(column)}) FROM raw")
    if largest is None:
        return "iso" if is_text(column.type) else "s"
    # Both small and large numbers are two units in one column: the first large one will be named.
    fitting = (unit for unit, (_, per_second) in TIME_UNITS.items() if largest <= LAST_SECOND * per_second)
    return "s" if least <= LAST_SECOND else cast(TimeUnit, next(fitting, "s"))


def _target(role: str, options: ImportOptions) -> str:
    """The column of `events` that a role becomes."""
    return {"time": "seconds", options.signal: "positive"}.get(role, f"{role}_id")


def _fault(column: Column, options: ImportOptions) -> str:
    """SQL for whether a value does not fit. An artist or album may be missing."""
    is_null = f"{_target(column.role, options)} IS NULL"
    return f"({is_null} AND {_present(column)} IS NOT NULL)" if column.role in OPTIONAL_ROLES else f"({is_null})"


def _value(connection: Any, column: Column, options: ImportOptions) -> str:
    """SQL for the value of a column in the store."""
    if column.role in ID_ROLES:
        return _id(connection, column)
    if column.role == "time":
        per_second = TIME_UNITS.get(options.time_unit, ("", 0))[1]
        whole = f"whole_seconds({microseconds(column.name, column.type, per_second)}, 1000000)"
        if is_integer(column.type) and per_second:
            whole = f"whole_seconds(TRY_CAST({column.name} AS BIGINT), {per_second})"
        return f"bounded({whole}, 0, {LAST_SECOND})::UINTEGER"
    if column.role == "rating":
        return f"({_number(column)} >= {options.positive_from!r})"
    positive, text = f"({label(column.name, column.type, options.positives)})::BOOLEAN", f"{column.name}::VARCHAR"
    # A label of -1, 0 and 1 has three values.
    if not options.positives and fetch_row(connection, f"SELECT bool_or({text} IN ('0', '0.0')) FROM raw")[0]:
        return f"CASE WHEN NOT starts_with({text}, '-') THEN {positive} END"
    return positive


def _id(connection: Any, column: Column) -> str:
    """SQL for an id: a number if all of the column's ids are integers without leading zeros, else text."""
    value = _present(column)
    if is_text(column.type):
        are_integers = f"SELECT bool_and(regexp_full_match({value}, '{_INTEGER_ID}')) FROM raw"
        if fetch_row(connection, are_integers)[0] is False:
            return value
        value = f"CASE WHEN regexp_full_match({value}, '{_INTEGER_ID}') THEN {value} END"
    elif column.type in ("FLOAT", "DOUBLE"):
        value = f"CASE WHEN {value} = floor({value}) THEN {value} END"
    elif not is_integer(column.type):
        return "NULL::BIGINT"
    return f"TRY_CAST({value} AS BIGINT)"


def _present(column: Column) -> str:
    """SQL for an id as it is, NULL where it only says that it is missing."""
    if column.type in ("FLOAT", "DOUBLE"):
        return f"CASE WHEN NOT isnan({column.name}) THEN {column.name} END"
    return present(column.name, column.type, trimmed=True) if is_text(column.type) else column.name


def _number(column: Column) -> str:
    """SQL for a finite number, or NULL."""
    return number(column.name, column.type, trimmed=True)


def _explain(column: Column, value: str | None, options: ImportOptions) -> tuple[str, str]:
    """Say what is wrong with a value, and what to do."""
    role, fix = column.role, "repair or remove that row, or check which column is which"
    if value is None:
        return f"no {role}", fix
    if role in ID_ROLES and value in MISSING:
        return f"no {role}: {value!r} stands for a missing value", "remove such rows, or give that id another name"
    if role in ID_ROLES:
        allowed, fix = "text or an integer below 2**63", "store the column as text or integers"
    elif role == "time":
        allowed, fix = (
            "an ISO time from 1970 to 2106 like 2024-05-01T12:00:00",
            "check --time-unit: s, ms, us, ns or iso",
        )
        if options.time_unit != "iso":
            unit, per_second = TIME_UNITS[options.time_unit]
            allowed = f"a time of 0 to {LAST_SECOND * per_second:,} {unit}"
    else:
        allowed = "0 or 1, false or true" if role == "label" else "a number"
    usual = is_text(column.type) or is_integer(column.type) or column.type in ("FLOAT", "DOUBLE")
    kind, shown = "" if usual else f" (of type {column.type})", repr(value) if is_text(column.type) else value
    return f"{role} {shown}{kind} is not {allowed}", fix


def number_ids(connection: Any, role: str, path: Path) -> Originals:
    """Replace a role's ids in `events` by 1, 2 and so on in ascending order; the table `<role>_ids` has both.

    The file gets one JSON value per line, so that line k has what id k was.
    """
    connection.execute(
        f"CREATE TABLE {role}_ids AS SELECT value, (row_number() OVER ())::UINTEGER AS id FROM "
        f"(SELECT DISTINCT {role}_id AS value FROM events WHERE {role}_id IS NOT NULL ORDER BY value)"
    )
    connection.execute(
        f"CREATE TABLE numbered AS SELECT events.* REPLACE (id AS {role}_id) "
        f"FROM events LEFT JOIN {role}_ids ON value = {role}_id"
    )
    connection.execute("DROP TABLE events")
    connection.execute("ALTER TABLE numbered RENAME TO events")
    lines, encode = 0, json.JSONEncoder(ensure_ascii=False).encode
    kind = "text" if column_types(connection, f"{role}_ids")["value"] == "VARCHAR" else "number"
    result = connection.execute(f"SELECT value FROM {role}_ids ORDER BY id")
    with writing(path, fix=RESTART), path.open("wb") as file:
        while values := result.fetchmany(_AT_ONCE):
            poll()
            lines += len(values)
            file.write("".join(f"{encode(value)}\n" for (value,) in values).encode())
        file.flush()
        os.fsync(file.fileno())
    return Originals(file=path.name, lines=lines, kind=kind, sha256=sha256(path))


def catalogue(connection: Any) -> NDArray[np.uint32]:
    """The artist and album of every item: of several the last in the file counts."""
    catalogue_I2 = np.zeros((fetch_row(connection, "SELECT max(item_id) FROM events")[0] + 1, 2), np.uint32)
    stored = column_types(connection, "events")
    for position, role in enumerate(OPTIONAL_ROLES):
        if f"{role}_id" in stored:
            last = f"SELECT item_id, arg_max({role}_id, row)::UINTEGER FROM events"
            query = f"{last} WHERE {role}_id IS NOT NULL GROUP BY item_id"
            for batch in connection.sql(query).to_arrow_reader(_AT_ONCE):
                item, group = (column.to_numpy() for column in batch.columns)
                catalogue_I2[item, position] = group
    return catalogue_I2
