"""Convert the table `raw` to the table `events`: numbered ids, seconds, and whether they are positive."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...files import sha256, writing
from ...stop import poll
from ..files.file import Source
from ..files.raw_rows import RawRows
from ..files.text_rows import BadRows
from ..files.values import RESTART, column_types, is_integer, is_text, present
from .manifest import Originals
from .options import ImportOptions, SideRole

ID_ROLES: tuple[SideRole, ...] = ("user", "item")
_AT_ONCE = 1 << 16
_FIRST_IDS = "(FROM raw LIMIT 1000)"
_INTEGER_ID = r"0|-?[1-9][0-9]{0,17}"


def convert(connection: Any, source: Source, options: ImportOptions, bad: BadRows) -> ImportOptions:
    """Create the table `events`: row, user_id, item_id, seconds, positive, and the further columns of an event.

    Rows that do not fit are left out as far as `bad` allows. Returns the options with the unit of times and the least
    positive rating of the file.
    """
    raw = RawRows(connection, source, options, bad)
    values = {"seconds": _order(options), "positive": "true"}
    # In the order in which the faults of one row are reported.
    for role in ID_ROLES:
        values[f"{role}_id"] = _id(raw, role)
    if "time" in raw.kinds:
        time, unit = raw.time("time", first=0)
        values["seconds"] = f"({time} // 1000000)::UINTEGER"
        options = replace(options, time_unit=unit)
    if options.signal is not None:
        is_rating = options.signal == "rating"
        values["positive"], threshold = raw.positive(
            options.signal, options.columns[options.signal], is_rating=is_rating
        )
        options = replace(options, positive_from=threshold)
    values |= {column: _context(column, raw.kinds[column]) for column in options.context_columns}
    raw.leave_out()
    raw.count()
    selected = ", ".join(f"{value} AS {name}" for name, value in values.items())
    connection.execute(f"CREATE TABLE events AS SELECT rowid AS row, {selected} FROM raw")
    connection.execute("DROP TABLE raw")
    return options


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


def _id(raw: RawRows, role: str) -> str:
    """SQL for an id: a number if all of the column's ids are integers without leading zeros, else text."""
    kind, value = raw.kinds[role], f'"{role}"'
    if kind in ("FLOAT", "DOUBLE"):
        value = f"CASE WHEN NOT isnan({value}) THEN {value} END"
    value = present(value) if is_text(kind) else value
    number = not is_text(kind)
    if is_text(kind):
        is_integer_id = f"regexp_full_match({value}, '{_INTEGER_ID}')"
        # Nearly always the first ids tell that they are text.
        number = all(raw.row(f"bool_and({is_integer_id}) FROM {rows}")[0] is not False for rows in (_FIRST_IDS, "raw"))
        value = f"CASE WHEN {is_integer_id} THEN {value} END" if number else value
    elif kind in ("FLOAT", "DOUBLE"):
        value = f"CASE WHEN {value} = floor({value}) THEN {value} END"
    elif not is_integer(kind):
        value = "NULL"
    value = f"TRY_CAST({value} AS BIGINT)" if number else value
    fix = "remove that row, or store the ids as text"
    raw.refuse(f"({value} IS NULL)", role, role, "text or an integer below 2**63", fix)
    return value


def _context(column: str, kind: str) -> str:
    """SQL for a further column of an event, which may be missing."""
    return present(f'"{column}"') if is_text(kind) else f'"{column}"'


def number_ids(connection: Any, draft: Path) -> dict[str, Originals]:
    """Replace ids in `events` by 1, 2 and so on in ascending order; the table `<role>_ids` has both.

    A file for each role gets one JSON value per line, so that line k has what id k was.
    """
    for role in ID_ROLES:
        connection.execute(
            f"CREATE TABLE {role}_ids AS SELECT value, (row_number() OVER ())::UINTEGER AS id FROM "
            f"(SELECT DISTINCT {role}_id AS value FROM events WHERE {role}_id IS NOT NULL ORDER BY value)"
        )
    numbers = ", ".join(f"{role}_ids.id AS {role}_id" for role in ID_ROLES)
    joined = " ".join(f"LEFT JOIN {role}_ids ON {role}_ids.value = {role}_id" for role in ID_ROLES)
    connection.execute(f"CREATE TABLE numbered AS SELECT events.* REPLACE ({numbers}) FROM events {joined}")
    connection.execute("DROP TABLE events")
    connection.execute("ALTER TABLE numbered RENAME TO events")
    return {f"{role}s": _write_ids(connection, role, draft / f"{role}s.jsonl") for role in ID_ROLES}


def _write_ids(connection: Any, role: str, path: Path) -> Originals:
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
