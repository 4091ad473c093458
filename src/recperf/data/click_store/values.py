"""The values of a column as features read them, in SQL: one definition for an import and for rows to be scored.

A category is text without whitespace around it; the number 3.0 is the category 3. Empty text, and text like NA or null,
is missing. Times are microseconds since 1970.
"""

from __future__ import annotations

from typing import Any

from ..user_files.database import literal
from ..user_files.spellings import FALSE, MISSING, NUMBER, TRUE

_WHITESPACE = "".join(chr(code) for code in range(1, 0x3001) if chr(code).isspace())
_INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")


def is_text(kind: str) -> bool:
    return kind == "VARCHAR"


def is_integer(kind: str) -> bool:
    return kind.removeprefix("U") in _INTEGERS


def is_number(kind: str) -> bool:
    return is_integer(kind) or kind in ("FLOAT", "DOUBLE") or kind.startswith("DECIMAL")


def is_time(kind: str) -> bool:
    return kind.startswith(("TIMESTAMP", "DATE"))


def is_list(kind: str) -> bool:
    return kind.endswith("]")


def present(name: str, kind: str, *, trimmed: bool) -> str:
    """SQL for text without the whitespace around it, NULL where it says that it is missing."""
    name = name if trimmed else _trimmed(name)
    return f"CASE WHEN {name} NOT IN ({names(('', *MISSING))}) THEN {name} END"


def _trimmed(name: str) -> str:
    trim = f"trim({name}, {literal(_WHITESPACE)})"
    # Most values are printable ASCII without spaces; testing for that is far faster than trimming.
    return f"CASE WHEN regexp_full_match({name}, '[!-~]+') THEN {name} ELSE {trim} END"


def category(name: str, kind: str, *, trimmed: bool = False) -> str:
    """SQL for a category as text, or NULL."""
    if is_text(kind):
        name = name if trimmed else _trimmed(name)
        text = present(name, kind, trimmed=True)
        whole = f"regexp_full_match({name}, '-?[0-9]+[.]0+')"
        return f"CASE WHEN ends_with({name}, '0') AND {whole} THEN split_part({text}, '.', 1) ELSE {text} END"
    if kind in ("FLOAT", "DOUBLE"):
        whole = f"{name} = floor({name}) AND abs({name}) < 1e15"
        return f"CASE WHEN isnan({name}) THEN NULL WHEN {whole} THEN {name}::BIGINT::VARCHAR ELSE {name}::VARCHAR END"
    return f"{name}::VARCHAR"


def categories(name: str, kind: str, separator: str, *, trimmed: bool = False) -> str:
    """SQL for the list of categories of a multi-valued column; empty where none is there."""
    if is_list(kind):
        parts = f"{name}::VARCHAR[]"
    else:
        text = present(name, kind, trimmed=trimmed) if is_text(kind) else f"{name}::VARCHAR"
        split = f"string_split({text}, {literal(separator)})"
        is_json = f"starts_with({text}, '[') AND json_valid({text})"
        parts = f"CASE WHEN {is_json} THEN from_json({text}, '[\"VARCHAR\"]') ELSE {split} END"
    cleaned = f"list_transform({parts}, lambda x: {category('x', 'VARCHAR')})"
    return f"coalesce(list_sort(list_distinct(list_filter({cleaned}, lambda x: x IS NOT NULL))), []::VARCHAR[])"


def number(name: str, kind: str, *, trimmed: bool = False) -> str:
    """SQL for a finite number, or NULL."""
    if is_text(kind):
        text = name if trimmed else present(name, kind, trimmed=False)
        value = f"CASE WHEN regexp_full_match({text}, '{NUMBER}') THEN TRY_CAST({text} AS DOUBLE) END"
    elif is_number(kind) or kind == "BOOLEAN":
        value = f"{name}::DOUBLE"
    else:
        return "NULL::DOUBLE"
    return f"CASE WHEN isfinite({value}) THEN {value} END"


def no_number(name: str, kind: str, *, trimmed: bool = False) -> str:
    """SQL for whether a value is neither missing nor a finite number."""
    if is_text(kind):
        return f"({present(name, kind, trimmed=trimmed)} IS NOT NULL AND {number(name, kind, trimmed=trimmed)} IS NULL)"
    if kind in ("FLOAT", "DOUBLE"):
        return f"coalesce(isinf({name}), false)"
    return "false" if is_number(kind) or kind == "BOOLEAN" else f"({name} IS NOT NULL)"


def microseconds(name: str, kind: str, per_second: int) -> str:
    """SQL for a time, or NULL; `per_second` is the unit of times that are numbers, 0 for ISO text."""
    if is_time(kind):
        return f"epoch_us({name})"
    if per_second == 0:
        return f"epoch_us(TRY_CAST({name} AS TIMESTAMPTZ))" if is_text(kind) else "NULL::BIGINT"
    if is_integer(kind) and per_second == 1:
        return f"TRY_CAST({name} AS BIGINT) * 1000000"
    return f"TRY_CAST(round({number(name, kind, trimmed=True)} * {1_000_000 / per_second!r}) AS BIGINT)"


def label(name: str, positives: tuple[str, ...] = ()) -> str:
    """SQL for 0 or 1, or NULL; with `positives` these values are 1 and all others 0."""
    text = f"lower({name}::VARCHAR)"
    if positives:
        clicked = names(value.lower() for value in positives)
        return f"CASE WHEN {text} IN ({clicked}) THEN 1 WHEN {text} IS NOT NULL THEN 0 END"
    return f"CASE WHEN {text} IN ({names(TRUE)}) THEN 1 WHEN {text} IN ({names(FALSE)}) THEN 0 END"


def names(values: Any) -> str:
    return ", ".join(map(literal, values))
