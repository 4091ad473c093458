"""Recognises what columns of a user's file are: by their usual names, and a time also by its values.

A column has times if at least 99 % of its values are dates, or if all are whole numbers that lie between 1995 and 2106
in one unit. Only the first rows are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from .values import LAST_SECOND, MISSING, TIME_UNITS, plain

FIRST_ROWS: Final = 1000
"""Rows that are looked at."""
_DATES = 0.99
"""Share of a column's texts that must be dates."""
_FIRST_SECOND = 788_918_400
"""1995: whole numbers from here on may be times."""
_LEAST_VALUES = 2
_LONGEST = 200
"""Characters of the longest text that can be a category or a title."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ].*)?")


def recognised_columns(names: Sequence[str], usual: Sequence[str]) -> list[int]:
    """Positions of columns with usual names, the likeliest first; a name that several columns have does not count."""
    plain_names = [plain(name) for name in names]
    return [plain_names.index(name) for name in usual if plain_names.count(name) == 1]


def columns_of_times(rows: Sequence[Sequence[Any]]) -> list[int]:
    """Positions of the columns whose values are times in all rows that are given."""
    return [at for at, values in enumerate(zip(*rows)) if _are_times(values)]


def columns_within(rows: Sequence[Sequence[Any]], item: int) -> list[int]:
    """Positions of the columns that have one value in all given rows of an item, which is in column `item`. Columns of
    long texts are left out."""
    columns = []
    for at, values in enumerate(zip(*rows)):
        of_item: dict[str, str] = {}
        for row, value in zip(rows, values):
            if value is None or (text := str(value).strip()) in ("", *MISSING):
                continue
            if len(text) > _LONGEST or of_item.setdefault(str(row[item]), text) != text:
                break
        else:
            columns += [at] if of_item else []
    return columns


def _are_times(values: Sequence[Any]) -> bool:
    there = [value for value in values if value is not None and str(value).strip() not in ("", *MISSING)]
    if len(there) < _LEAST_VALUES or isinstance(there[0], bool):
        return False
    numbers = [_whole(value) for value in there]
    if all(number is not None for number in numbers):
        bounds = ((_FIRST_SECOND * per, (LAST_SECOND + 1) * per) for _, per in TIME_UNITS.values())
        return any(all(least <= (number or 0) < most for number in numbers) for least, most in bounds)
    return sum(map(_is_date, there)) >= _DATES * len(there)


def _whole(value: Any) -> int | None:
    if isinstance(value, int):
        return value
    text = str(value).strip()
    return int(text) if re.fullmatch(r"\d{9,19}", text) else None


def _is_date(value: Any) -> bool:
    if isinstance(value, datetime):
        return True
    # What DuckDB reads as a time as well.
    text = str(value).strip().removesuffix(" UTC").replace("/", "-")
    try:
        return _DATE.fullmatch(text) is not None and datetime.fromisoformat(text) is not None
    except ValueError:
        return False
