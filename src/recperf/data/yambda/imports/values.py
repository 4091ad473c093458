"""Columns of someone's events to the numbers of a store. A value that does not fit is an error with its place.

Shapes: B rows of a batch. Columns are pyarrow arrays, of text or of a type of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schema import EVENT_TYPES
from .options import Signal, TimeUnit
from .read import arrow

LAST_SECOND = 0xFFFFFFFF
LARGEST_RATIO = 0xFFFF
FULLY_PLAYED = 100
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_NO_ISO = "is not an ISO time (2024-05-01T12:00:00), with a zone in every row or in none"
_PLAIN = "store it as integers or text"
_TRUTHS = {"1": True, "true": True, "1.0": True, "0": False, "false": False, "0.0": False}


class BadValue(Exception):
    """A value that cannot be used: which row of the batch, why, and what to do."""

    def __init__(self, row: int, what: str, fix: str | None = None) -> None:
        super().__init__(what)
        self.row, self.what, self.fix = row, what, fix


def encoded(column: Any, role: str) -> tuple[Any, NDArray[np.int64]]:
    """The distinct values of a column and each row's place among them, -1 where there is none. Text loses the blanks
    around it; empty text is no value."""
    pa, compute = arrow(), arrow(".compute")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_nested(column.type):
        raise BadValue(0, f"the {role} is of type {column.type}, which is more than one value")
    column = _as_text(column, role)
    try:
        found = column.dictionary_encode()
    except pa.ArrowNotImplementedError:
        raise BadValue(0, f"the {role} is of type {column.type}, which cannot be read", _PLAIN) from None
    if is_text(column.type):
        trimmed = compute.utf8_trim_whitespace(found.dictionary)
        if not trimmed.equals(found.dictionary):
            found = compute.utf8_trim_whitespace(column).dictionary_encode()
    places_B = found.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    if is_text(column.type):
        empty = compute.index(found.dictionary, pa.scalar("", pa.string())).as_py()
        if empty >= 0:
            places_B[places_B == empty] = -1
    return found.dictionary, places_B


def is_text(kind: Any) -> bool:
    types = arrow().types
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    return any(is_one(kind) for is_one in (*texts, types.is_binary, types.is_large_binary, types.is_binary_view))


def _as_text(column: Any, name: str) -> Any:
    """Text of any type, bytes among them, as the one that everything can be done with; other columns as they are."""
    pa = arrow()
    if not is_text(column.type):
        return column
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        row = _first_bad(column, lambda part: part.cast(pa.string()))
        raise BadValue(row, f"the {name} is not UTF-8 text", "convert it to UTF-8") from None


def times(column: Any, unit: TimeUnit) -> NDArray[np.uint32]:
    """Whole seconds. A column of type timestamp or date says its unit itself."""
    pa, compute = arrow(), arrow(".compute")
    types = pa.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        column = compute.utf8_trim_whitespace(_as_text(column, "time"))
        column = compute.if_else(compute.equal(column, ""), None, column)
    _require_all(column, "time")
    if types.is_date(column.type):
        column = column.cast(pa.timestamp("s"))
    if types.is_timestamp(column.type):
        seconds_B = column.cast(pa.int64()).to_numpy() // _PER_SECOND[column.type.unit]
    elif unit == "iso":
        if not is_text(column.type):
            raise BadValue(0, f"the time is of type {column.type}, not text like 2024-05-01T12:00:00", "--time-unit s")
        seconds_B = _from_iso(column)
    else:
        seconds_B = _from_number(column, _PER_SECOND[unit])
    _check_range(seconds_B, column, unit)
    return np.asarray(seconds_B, np.uint32)


def signals(column: Any, kind: Signal, positive_from: float, needed_B: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Played ratios in percent. Ratings and labels become 100 or 0; rows that do not need a value have 0."""
    rows = np.flatnonzero(needed_B)
    values, places = encoded(column.take(arrow().array(rows)) if len(rows) < len(column) else column, kind)
    if (places < 0).any():
        raise BadValue(int(rows[np.argmax(places < 0)]), f"no {kind}")
    try:
        if kind == "label":
            ratios = _labels(values)
        else:
            numbers = _numbers(values, kind)
            ratios = _ratios(numbers) if kind == "ratio" else np.where(numbers >= positive_from, FULLY_PLAYED, 0)
    except BadValue as error:
        # What was found at fault is a distinct value; its row is the first that has it.
        error.row = int(rows[np.argmax(places == error.row)])
        raise
    ratios_B = np.zeros(len(column), np.uint16)
    ratios_B[rows] = ratios[places]
    return ratios_B


def types(column: Any) -> NDArray[np.uint8]:
    """Event types by their place in the schema."""
    values, places_B = encoded(column, "type")
    missing = np.flatnonzero(places_B < 0)
    if len(missing):
        raise BadValue(int(missing[0]), "no type")
    codes = np.zeros(max(1, len(values)), np.uint8)
    for place, value in enumerate(values.to_pylist()):
        name = str(value).lower()
        if name not in EVENT_TYPES:
            row = int(np.argmax(places_B == place))
            raise BadValue(row, f"unknown type {value!r}; known: {', '.join(EVENT_TYPES)}")
        codes[place] = EVENT_TYPES.index(name)
    return codes[places_B]


def _ratios(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    outside = np.flatnonzero((numbers < 0) | (numbers > LARGEST_RATIO))
    if len(outside):
        value = float(numbers[outside[0]])
        raise BadValue(int(outside[0]), f"ratio {value:g} is not a percentage of 0 to {LARGEST_RATIO}")
    # Cut, not rounded: 49.9 percent is not half.
    return np.floor(numbers)


def _labels(values: Any) -> NDArray[np.float64]:
    truths = [_TRUTHS.get(str(value).lower()) for value in values.to_pylist()]
    if None in truths:
        wrong = truths.index(None)
        raise BadValue(wrong, f"label {values[wrong].as_py()!r} is neither 0 nor 1")
    return np.array(truths, np.float64) * FULLY_PLAYED


def _numbers(column: Any, name: str) -> NDArray[np.float64]:
    pa = arrow()
    kind = column.type
    if not (is_text(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise BadValue(0, f"the {name} is of type {kind}, which is not a number")
    numbers = _cast(column, lambda part: part.cast(pa.float64(), safe=False), name, "is not a number")
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        raise BadValue(int(bad[0]), f"{name} {column[int(bad[0])].as_py()!r} is not a number")
    return np.asarray(numbers, np.float64)


def _require_all(column: Any, name: str) -> None:
    if column.null_count:
        raise BadValue(int(np.argmax(column.is_null().to_numpy(zero_copy_only=False))), f"no {name}")


def _from_number(column: Any, per_second: int) -> NDArray[np.int64]:
    pa = arrow()
    if pa.types.is_integer(column.type) or is_text(column.type):
        try:
            return np.asarray(column.cast(pa.int64()).to_numpy() // per_second)
        except pa.ArrowInvalid:
            pass
    # Clipped to what int64 holds, which is still far beyond what a store holds.
    return np.clip(np.floor(_numbers(column, "time") / per_second), -1, 1 << 60).astype(np.int64)


def _from_iso(column: Any) -> NDArray[np.int64]:
    """Times that all have a zone, or none, which is UTC."""
    pa = arrow()
    zone = "UTC" if _ok(lambda part: part.cast(pa.timestamp("ns", "UTC")), column[:1]) else None
    kind = pa.timestamp("ns", zone)
    return _cast(column, lambda part: part.cast(kind).cast(pa.int64()), "time", _NO_ISO) // _PER_SECOND["ns"]


def _cast(column: Any, cast: Callable[[Any], Any], name: str, complaint: str) -> NDArray[Any]:
    """A cast of a whole column; where it fails, the first value at fault is found by halving."""
    try:
        return np.asarray(cast(column).to_numpy(zero_copy_only=False))
    except arrow().ArrowInvalid:
        bad = _first_bad(column, cast)
        raise BadValue(bad, f"{name} {column[bad].as_py()!r} {complaint}") from None


def _first_bad(column: Any, cast: Callable[[Any], Any]) -> int:
    """The first row a cast fails at, where it fails at one."""
    good, bad = 0, len(column)
    while bad - good > 1:
        middle = (good + bad) // 2
        if _ok(cast, column[good:middle]):
            good = middle
        else:
            bad = middle
    return good


def _ok(cast: Callable[[Any], Any], part: Any) -> bool:
    try:
        cast(part)
    except arrow().ArrowInvalid:
        return False
    return True


def _check_range(seconds_B: NDArray[np.int64], column: Any, unit: str) -> None:
    bad = np.flatnonzero((seconds_B < 0) | (seconds_B > LAST_SECOND))
    if not len(bad):
        return
    row = int(bad[0])
    value = column[row].as_py()
    if seconds_B[row] < 0:
        raise BadValue(
            row, f"time {value} is negative or before 1970", "shift the times so that the first is 0 or more"
        )
    finer = {"s": "ms", "ms": "us"}.get(unit)
    hint = f"if these are finer than {unit}: --time-unit {finer}" if finer else None
    raise BadValue(row, f"time {value} in {unit} is beyond the last second a store holds ({LAST_SECOND:,})", hint)
