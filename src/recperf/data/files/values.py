"""How values of a user's file are written, and what they mean in SQL: one definition for imports and for scoring; and
the DuckDB database of an import, within a memory limit, with temporary files in a folder that is removed.

A category is text without whitespace around it; the number 3.0 is the category 3. Empty text, and text like NA or null,
is missing. Categories are compared by a key, which is the same whatever they are read from: in a column of numbers that
of the number, in a column of booleans small letters, else the text itself. Times are microseconds since 1970. Except
for `stripped`, the SQL of columns of text is for text without whitespace around it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from ...errors import DataError
from ...files import writing
from ...stop import FLAG
from ..tables import optional_package

RESTART: Final = "the same command starts again from the beginning"
NOT_USED: Final = "'in_clause,common_subexpressions'"
"""Optimizers of DuckDB that wide files do without: with them 100 columns of text do not fit into 1,024 MiB."""
_MAX_THREADS = 4
_BYTES_PER_THREAD = 128 << 20

TRUE: Final = ("1", "true", "1.0", "yes")
FALSE: Final = ("0", "false", "0.0", "no", "-1", "-1.0")
MISSING: Final = (
    "#N/A", "#NA", "-NaN", "-nan", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "\\N", "n/a", "nan", "null",
)  # fmt: skip
"""How programs write a missing value; taken for an id, all users without one would become one user."""
NUMBER: Final = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
TIME_UNITS: Final = {
    "s": ("seconds", 1),
    "ms": ("milliseconds", 1_000),
    "us": ("microseconds", 1_000_000),
    "ns": ("nanoseconds", 1_000_000_000),
}
"""Name of each unit in which a file may have times, and how many of them a second has."""
LAST_SECOND: Final = 0xFFFFFFFF
"""The last time of a row, in 2106: stores of events have times as uint32."""
COLUMNS: Final = {
    "user": (
        *("user", "userid", "uid", "visitorid", "visitor", "customerid", "customer", "memberid", "reviewerid"),
        *("accountid", "profileid", "clientid", "playerid", "username", "sessionid", "session"),
        *("client", "account", "member", "reviewer"),
    ),
    "item": (
        *("item", "itemid", "iid", "movieid", "movie", "productid", "product", "articleid", "article", "adid"),
        *("trackid", "track", "songid", "song", "bookid", "book", "videoid", "video", "gameid", "game", "isbn"),
        *("parentasin", "asin", "businessid", "appid", "newsid", "animeid", "recipeid", "jobid", "courseid", "venueid"),
        *("placeid", "locationid", "poiid", "photoid", "postid", "contentid", "offerid", "adgroupid", "hotelid", "sku"),
        *("skuid", "goodsid", "aid", "artistid"),
    ),
    "time": (
        *("timestamp", "time", "ts", "datetime", "date", "eventtime", "createdat", "unixtimestamp", "unixreviewtime"),
        *("ratingtimestamp", "eventtimestamp", "eventdate", "tdat", "when", "orderdate", "purchasedate"),
    ),
    "rating": ("rating", "stars", "score", "bookrating", "overall", "reviewscore", "reviewoverall", "grade"),
    "label": (
        *("label", "clicked", "click", "isclicked", "isclick", "clk", "target", "converted", "conversion"),
        *("liked", "bought", "purchased", "isrecommended", "recommended"),
    ),
    "genres": ("genres", "genre", "categories", "category"),
}
"""Names by which the column of a role is recognised, the likeliest first, as `plain` writes them."""

CATEGORY: Final = "category"
"""As a type: text that is a category as it is."""
_WHITESPACE = "".join(chr(code) for code in range(1, 0x3001) if chr(code).isspace())
_INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
_WHOLE = {"FLOAT": 2**24, "DOUBLE": 2**53}
"""From here on a number of the type may stand for several whole numbers."""
_FIRST = 100
Values = Literal["text", "number", "boolean"]
"""What all values of a column are; numbers that are written in two ways, such as 1.5 and 1.50, are text."""


def plain(name: str) -> str:
    """A column's name in small letters, without other characters."""
    return re.sub("[^a-z0-9]", "", name.lower())


def is_text(kind: str) -> bool:
    return kind == "VARCHAR"


def is_integer(kind: str) -> bool:
    return kind.removeprefix("U") in _INTEGERS


def is_number(kind: str) -> bool:
    return is_integer(kind) or kind in _WHOLE or kind.startswith("DECIMAL")


def is_time(kind: str) -> bool:
    return kind.startswith(("TIMESTAMP", "DATE"))


def is_list(kind: str) -> bool:
    return kind.endswith("]")


def element(kind: str) -> str:
    """The type of the values of a list, or of a column that is none."""
    return kind[: kind.rindex("[")] if is_list(kind) else kind


def values_of(kind: str) -> Values | None:
    """What values of a type are as categories; None if they cannot be categories."""
    if is_text(kind) or kind == '"NULL"':
        return "text"
    return "boolean" if kind == "BOOLEAN" else "number" if is_number(kind) else None


def present(name: str) -> str:
    """SQL for text, NULL where it says that it is missing."""
    # Most values are longer, and comparing with every text takes far longer than that.
    longer = f"strlen({name}) > {max(map(len, MISSING))}"
    return f"CASE WHEN {longer} OR {name} NOT IN ({names(('', *MISSING))}) THEN {name} END"


def stripped(name: str) -> str:
    """SQL for text without the whitespace around it, NULL where nothing is left."""
    # Most values begin and end with printable ASCII; testing for that is far faster than trimming.
    ends = f"{name} BETWEEN '!' AND '~' AND right({name}, 1) BETWEEN '!' AND '~'"
    return f"CASE WHEN {ends} THEN {name} ELSE nullif(trim({name}, {literal(_WHITESPACE)}), '') END"


def category(name: str, kind: str) -> str:
    """SQL for a category as text, or NULL."""
    if kind == CATEGORY:
        return name
    if is_text(kind):
        text = present(name)
        whole = f"regexp_full_match({name}, '-?[0-9]+[.]0+')"
        return f"CASE WHEN ends_with({name}, '0') AND {whole} THEN split_part({text}, '.', 1) ELSE {text} END"
    if kind in _WHOLE:
        whole = f"{name} = floor({name}) AND NOT {inexact(name, kind)}"
        return f"CASE WHEN isnan({name}) THEN NULL WHEN {whole} THEN {name}::BIGINT::VARCHAR ELSE {name}::VARCHAR END"
    text = f"{name}::VARCHAR"
    return category(text, "VARCHAR") if kind.startswith("DECIMAL") else text


def inexact(name: str, kind: str) -> str:
    """SQL for whether a number may be another whole number, rounded: ids that became floating-point numbers."""
    return f"coalesce(abs({name}) >= {_WHOLE[kind]} AND NOT isnan({name}), false)" if kind in _WHOLE else "false"


def categories(name: str, kind: str, separator: str) -> str:
    """SQL for the list of categories of a multi-valued column, as text."""
    if is_text(kind):
        text = present(name)
        split = f"string_split({text}, {literal(separator)})"
        is_json = f"starts_with({text}, '[') AND json_valid({text})"
        parts = f"CASE WHEN {is_json} THEN from_json({text}, '[\"VARCHAR\"]') ELSE {split} END"
    else:
        parts = f"{name}::{element(kind)}[]" if is_list(kind) else f"[{name}]"
    value = stripped("x") if is_text(element(kind)) else "x"
    return f"list_transform({parts}, lambda x: {category(value, element(kind))})"


def key(text: str, values: Values) -> str:
    """SQL for what a category is compared by. Text that is no number or no boolean stays, and equals none of them."""
    if values != "number":
        return f"lower({text})" if values == "boolean" else text
    # Digits are never read as a floating-point number, which would round them.
    digits = f"regexp_replace(regexp_replace({text}, '^[+]?(-?)0*([0-9]+)$', '\\1\\2'), '^-0$', '0')"
    return (
        f"CASE WHEN regexp_full_match({text}, '-?[1-9][0-9]*') THEN {text} "
        f"WHEN regexp_full_match({text}, '[+-]?[0-9]+') THEN {digits} "
        f"WHEN {is_value(text, 'number')} THEN {category(f'TRY_CAST({text} AS DOUBLE)', 'DOUBLE')} ELSE {text} END"
    )


def keys(texts: str, values: Values) -> str:
    """SQL for the distinct keys of a list of categories, in their order; empty where none is there."""
    keyed = f"list_transform(list_filter({texts}, lambda x: x IS NOT NULL), lambda x: {key('x', values)})"
    return f"coalesce(list_sort(list_distinct({keyed})), []::VARCHAR[])"


def is_value(text: str, values: Values) -> str:
    """SQL for whether a category denotes a number or a boolean."""
    if values == "boolean":
        return f"lower({text}) IN ('true', 'false')"
    return f"(regexp_full_match({text}, '{NUMBER}') AND isfinite(TRY_CAST({text} AS DOUBLE)))"


def values_in(connection: Any, table: str) -> Values:
    """What all texts of a table's column `value` are. Numbers that are written in two ways are text: 501 and 00501."""
    # Nearly always the first values tell that a column is text.
    first = connection.execute(f"SELECT value FROM {table} LIMIT {_FIRST}").fetchall()
    if any(value.lower() not in ("true", "false") and not re.fullmatch(NUMBER, value) for (value,) in first):
        return "text"
    booleans, numbers, plain = fetch_row(
        connection,
        f"SELECT bool_and({is_value('value', 'boolean')}), bool_and({is_value('value', 'number')}), "
        f"bool_and({key('value', 'number')} = value) FROM {table}",
    )
    if not (booleans or numbers):
        return "text"
    if booleans:
        return "boolean"
    repeated = f"SELECT {key('value', 'number')} AS key FROM {table} GROUP BY key HAVING min(value) <> max(value)"
    return "number" if plain or not connection.execute(f"{repeated} LIMIT 1").fetchall() else "text"


def is_short_number(text: str, number: str, kind: str) -> str:
    """SQL for whether a text is the shortest one of its number, which is a `kind`: then they are the same id, category
    and number."""
    if kind == "BIGINT":
        return f"({number}::VARCHAR = {text} AND {number} BETWEEN -999999999999999999 AND 999999999999999999)"
    shortest = f"{number}::VARCHAR = {text} OR TRY_CAST({number} AS BIGINT)::VARCHAR = {text}"
    return f"({number} BETWEEN {-_WHOLE[kind]} AND {_WHOLE[kind]} AND ({shortest}))"


def short_number(text: str, number: str, kind: str) -> str:
    """SQL for the number of a text, NULL for NULL. A text that is not the shortest one of its number ends the query
    with an error of conversion."""
    is_short = is_short_number(text, number, kind)
    return f"CASE WHEN {is_short} THEN {number} WHEN {text} IS NOT NULL THEN ('x' || {text})::{kind} END"


def number(name: str, kind: str) -> str:
    """SQL for a finite number, or NULL."""
    if is_text(kind):
        # Each mention of an expression is computed on its own.
        holds = f"regexp_full_match({name}, '{NUMBER}') AND isfinite(TRY_CAST({name} AS DOUBLE))"
        return f"CASE WHEN {holds} THEN TRY_CAST({name} AS DOUBLE) END"
    if kind in _WHOLE:
        return f"CASE WHEN isfinite({name}) THEN {name}::DOUBLE END"
    return f"{name}::DOUBLE" if is_number(kind) else "NULL::DOUBLE"


def no_number(name: str, kind: str) -> str:
    """SQL for whether a value is neither missing nor a finite number."""
    if is_text(kind):
        return f"({present(name)} IS NOT NULL AND {number(name, kind)} IS NULL)"
    if kind in _WHOLE:
        return f"coalesce(isinf({name}), false)"
    return "false" if is_number(kind) else f"({name} IS NOT NULL)"


def microseconds(name: str, kind: str, per_second: int) -> str:
    """SQL for a time, or NULL; `per_second` is the unit of times that are numbers, 0 for ISO text."""
    if is_time(kind):
        return f"epoch_us({name})"
    if per_second == 0:
        return f"epoch_us(TRY_CAST({name} AS TIMESTAMPTZ))" if is_text(kind) else "NULL::BIGINT"
    if is_integer(kind):
        whole, each = f"TRY_CAST({name} AS BIGINT)", 1_000_000 // per_second
        if not each:
            return f"({whole} // {per_second // 1_000_000})"
        most = (2**63 - 1) // each
        return f"CASE WHEN {whole} BETWEEN {-most} AND {most} THEN {whole} * {each} END"
    return f"TRY_CAST(round({number(name, kind)} * {1_000_000 / per_second!r}) AS BIGINT)"


def label(name: str, kind: str, positives: tuple[str, ...] = ()) -> str:
    """SQL for 0 or 1, or NULL; with `positives` these values are 1 and all others 0."""
    text = f"lower({category(name, kind)})"
    if positives:
        clicked = ", ".join(f"lower({category(literal(value.strip()), 'VARCHAR')})" for value in positives)
        return f"CASE WHEN {text} IN ({clicked}) THEN 1 WHEN {text} IS NOT NULL THEN 0 END"
    return f"CASE WHEN {text} IN ({names(TRUE)}) THEN 1 WHEN {text} IN ({names(FALSE)}) THEN 0 END"


def names(values: Any) -> str:
    return ", ".join(map(literal, values))


def literal(text: str) -> str:
    """Quote a string for SQL."""
    return "'" + text.replace("'", "''") + "'"


def fetch_row(connection: Any, query: str) -> tuple[Any, ...]:
    # A signal interrupts only a query that runs when it comes.
    FLAG.poll()
    (row,) = connection.execute(query).fetchall()
    return tuple(row)


def column_types(connection: Any, table: str) -> dict[str, str]:
    """The type of every column of a table or table function."""
    rows = connection.execute(f"SELECT column_name, column_type FROM (DESCRIBE FROM {table})").fetchall()
    return dict(rows)


@contextmanager
def open_database(folder: Path, *, memory: int) -> Iterator[Any]:
    """Open a connection whose temporary files go to `folder`. A lack of memory or disk space is one typed error."""
    duckdb = optional_package("duckdb")
    optional_package("pyarrow")
    threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1, memory // _BYTES_PER_THREAD))
    with writing(folder, fix=RESTART):
        folder.mkdir()
        try:
            with duckdb.connect() as connection:
                # Half, because DuckDB counts its buffers but neither its reader's nor what Python takes from it.
                for setting, value in (
                    ("memory_limit", f"'{memory // 2} B'"),
                    ("temp_directory", literal(str(folder))),
                    ("threads", threads),
                    ("preserve_insertion_order", "true"),
                    ("TimeZone", "'UTC'"),
                    ("disabled_optimizers", NOT_USED),
                ):
                    connection.execute(f"SET {setting} = {value}")
                # In a notebook without ipywidgets it is off and cannot even be set to that.
                if fetch_row(connection, "SELECT current_setting('enable_progress_bar')")[0]:
                    connection.execute("SET enable_progress_bar = false")
                with FLAG.calling(connection.interrupt):
                    yield connection
        # pyarrow has exceptions of its own for what DuckDB reports while its rows are read.
        except (duckdb.Error, OSError, ValueError) as error:
            FLAG.poll()
            message = str(error)
            if "No space left" in message or "max_temp_directory_size" in message:
                raise OSError(errno.ENOSPC, "no space left") from error
            if isinstance(error, duckdb.OutOfMemoryException) or "Out of Memory Error" in message:
                what = f"the import does not fit into {memory >> 20:,} MiB"
                raise DataError(what, fix="a larger --memory-mib") from error
            raise
    shutil.rmtree(folder)
