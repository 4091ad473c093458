"""What columns of a user's file are, by types and values: categories, numbers, or several categories in a row."""

from __future__ import annotations

import re
from typing import Literal

from . import values as sql
from .values import literal

Kind = Literal["categorical", "numeric", "multi"]
_CRITEO_NUMBER, _CRITEO_CATEGORY = (
    re.compile(r"(i|int|integer)_?[0-9]{1,2}"),
    re.compile(r"(c|cat|category)_?[0-9]{1,2}"),
)
_FEW_VALUES = 1000


def questions(column: str, kind: str, separator: str) -> list[str]:
    """SQL for what `decide` asks about a column, nothing if its type decides."""
    if sql.is_time(kind) or sql.is_list(kind) or sql.values_of(sql.element(kind)) is None:
        return []
    distinct = f"approx_count_distinct({sql.category(column, kind)})"
    if not sql.is_text(kind):
        return [f"count({column})", distinct, str(sql.is_integer(kind)), str(sql.is_number(kind)), "0.0"]
    value = sql.present(column)
    whole = f"bool_and(regexp_full_match({value}, '-?[0-9]{{1,18}}'))"
    number = f"NOT bool_or({sql.no_number(column, kind)})"
    return [f"count({value})", distinct, whole, number, f"avg(contains({value}, {literal(separator)})::INT)"]


def decide(
    name: str,
    kind: str,
    rows: int = 0,
    distinct: int = 0,
    whole: bool = False,
    numbers: bool = False,
    parts: float | None = None,
    *,
    often: int = 10,
) -> tuple[Kind | None, str]:
    """The kind of a column, or None and why it is no feature. Whole numbers that come `often` on average are categories
    of their own."""
    lower = name.lower()
    if sql.is_time(kind):
        return None, "a time"
    if sql.values_of(sql.element(kind)) is None:
        return None, f"of type {kind.partition('(')[0]}"
    if sql.is_list(kind):
        return "multi", ""
    if not rows or distinct < 2:
        return None, "the same everywhere" if rows else "empty"
    if _CRITEO_NUMBER.fullmatch(lower) and numbers:
        return "numeric", ""
    if _CRITEO_CATEGORY.fullmatch(lower):
        return "categorical", ""
    if numbers and not whole:
        return "numeric", ""
    usual = (*sql.COLUMNS["user"], *sql.COLUMNS["item"])
    is_id = re.search(r"(^|_)ids?$", lower) is not None or sql.plain(name) in usual
    if numbers and not is_id and not (distinct <= _FEW_VALUES and distinct * often <= rows):
        return "numeric", ""
    if distinct > max(2, rows / 2):
        return None, "almost every row has a value of its own"
    return ("multi" if parts and parts > 0.1 else "categorical"), ""
