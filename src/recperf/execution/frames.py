"""Frames of the libraries that a user works with: pandas, polars, pyarrow, or a dict of arrays. None is required."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..data.rows import Table, pyarrow
from ..errors import DataError, UsageError

KINDS = ("pandas", "polars", "pyarrow")
Columns = Mapping[str, Any]


def kind_of(value: Any) -> str:
    """The library of a frame or series: pandas, polars, pyarrow; or dict for anything else."""
    library = type(value).__module__.partition(".")[0]
    return library if library in KINDS else "dict"


def names_of(frame: Any) -> list[str]:
    """The names of a frame's columns."""
    kind = kind_of(frame)
    if kind == "dict" and not isinstance(frame, Mapping):
        raise UsageError(
            f"rows cannot be read from a {type(frame).__name__}",
            fix="a frame of pandas or polars, a table of pyarrow, or a dict of arrays",
        )
    return [
        str(name)
        for name in (frame.column_names if kind == "pyarrow" else frame.keys() if kind == "dict" else frame.columns)
    ]


def to_table(frame: Any, columns: Iterable[str]) -> Table:
    """Columns of a frame as a pyarrow table."""
    return pyarrow().table({name: array_of(frame[name], name) for name in columns})


def array_of(column: Any, name: str) -> Any:
    """A column of a frame, or a list, as an array of pyarrow. Refuses one that mixes types, whose values would be
    guessed."""
    kind = kind_of(column)
    if kind == "pyarrow":
        return column
    try:
        array = column.to_arrow() if kind == "polars" else pyarrow().array(column, from_pandas=True)
        types = set(map(type, column)) if getattr(column, "dtype", "object") == "object" else set()
        # pyarrow reads True among numbers as 1.
        if not (types & {bool, np.bool_}) or pyarrow().types.is_boolean(array.type):
            return array
        problem = "it has booleans among other values"
    except (ValueError, TypeError, OverflowError) as error:
        problem = str(error).splitlines()[0]
    raise DataError(f"column {name!r} has values of several types: {problem}", fix="give all values one type, or text")


def with_columns(frame: Any, columns: Columns) -> Any:
    """A copy of a frame with more columns, in place of those of the same names."""
    kind = kind_of(frame)
    if kind == "pandas":
        return frame.assign(**columns)
    if kind == "polars":
        from polars import Series

        return frame.with_columns(*(Series(name, values) for name, values in columns.items()))
    if kind == "pyarrow":
        arrow = pyarrow()
        frame = arrow.table(frame) if not isinstance(frame, arrow.Table) else frame
        frame = frame.select([name for name in frame.column_names if name not in columns])
        for name, values in columns.items():
            frame = frame.append_column(name, arrow.array(values))
        return frame
    return {**frame, **columns}


def maker(kind: str) -> Callable[[Table], Any]:
    """A function that turns a pyarrow table into a frame of that kind."""

    def polars(table: Table) -> Any:
        from polars import from_arrow

        return from_arrow(table)

    def plain(table: Table) -> dict[str, Any]:
        return {name: table[name].to_numpy() for name in table.column_names}

    makers: dict[str, Callable[[Table], Any]] = {
        "pandas": lambda table: table.to_pandas(), "polars": polars, "pyarrow": lambda table: table, "dict": plain
    }  # fmt: skip
    return makers[kind]
