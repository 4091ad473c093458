"""Rows of a user as pyarrow tables: in blocks, columns by their role, own ids as the numbers that tables count by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, MachineError, closest

Table = Any
"""A pyarrow.Table."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}(\.0*)?")


def pyarrow(part: str = "") -> Any:
    """Import pyarrow or a part of it; without it, name the extra to install."""
    try:
        return import_module(f"pyarrow{part}")
    except ImportError:
        raise MachineError(
            "rows are read and written by the package pyarrow", fix="pip install 'recperf[yambda]'"
        ) from None


class BadRow(DataError):
    """A value that a model cannot read; `row` counts from 0 in the table."""

    def __init__(self, row: int, what: str, fix: str) -> None:
        super().__init__(f"row {row + 1:,}: {what}", fix=fix)
        self.row, self.value = row, what

    def after(self, rows: int, path: Path) -> DataError:
        """The same error of a table that follows so many rows of a file."""
        return DataError(f"row {rows + self.row + 1:,}: {self.value}", where={"file": path}, fix=self.fix)


def in_blocks(tables: Iterable[Table], size: int, *, first: int = 0) -> Iterator[Table]:
    """The same rows in tables of `size` rows; those before row `first` are left out."""
    arrow = pyarrow()
    begun: list[Table] = []
    rows = 0
    for table in tables:
        skipped = min(first, len(table))
        first -= skipped
        begun.append(table.slice(skipped))
        rows += len(table) - skipped
        while rows >= size:
            joined = arrow.concat_tables(begun)
            yield joined.slice(0, size)
            begun, rows = [joined.slice(size)], rows - size
    if rows:
        yield arrow.concat_tables(begun)


def find_column(role: str, spellings: Sequence[str], names: Sequence[str], *, required: bool = True) -> str | None:
    """The column of rows that serves a role: the first of its spellings that is there, in any case of letters."""
    lower = {name.lower(): name for name in reversed(names)}
    column = next((name for name in spellings if name in names), None)
    column = column or next((lower[name.lower()] for name in spellings if name.lower() in lower), None)
    if column is None and required:
        guess = next((near for name in spellings if (near := closest(name, names))), None)
        serves = "" if role == spellings[0] else f" for the {role}"
        raise DataError(
            f"the rows have no column {spellings[0]!r}{serves}" + (f"; is it {guess!r}?" if guess else ""),
            where={"columns": ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")},
            fix=f"name the column that has it {spellings[0]!r}",
        )
    return column


class Ids:
    """The user's own ids of one role. Their numbers count from 1 in the order of `values`, or are given."""

    def __init__(self, role: str, values: Any, numbers_V: NDArray[np.int64] | None = None) -> None:
        self.role, self.values, self._numbers_V = role, values, numbers_V
        self.text = bool(pyarrow().types.is_string(values.type))

    @staticmethod
    def of(role: str, values: Sequence[int | str], numbers: NDArray[np.int64] | None = None) -> Ids:
        arrow = pyarrow()
        text = any(isinstance(value, str) for value in values)
        kind = arrow.string() if text else arrow.int64()
        return Ids(role, arrow.array(map(str, values) if text else values, kind), numbers)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def numbers_V(self) -> NDArray[np.int64]:
        """The numbers of all ids, in the order of `values`."""
        return np.arange(1, len(self.values) + 1) if self._numbers_V is None else self._numbers_V

    def places(self, column: Any) -> NDArray[np.int64]:
        """Where in `values` each id of a column is; -1 for one that is missing or unknown."""
        compute, arrow = pyarrow(".compute"), pyarrow()
        column = as_text(column) if self.text else as_integers(column, self.role)
        places = compute.fill_null(compute.index_in(column, value_set=self.values, skip_nulls=True), -1)
        return np.asarray(places.cast(arrow.int64()).to_numpy(zero_copy_only=False) if _single(places) else places)

    def of_numbers(self, numbers_N: NDArray[np.int64]) -> Any:
        """The own ids of numbers, all of which are known; the numbers of `values` must ascend."""
        return self.values.take(pyarrow().array(np.searchsorted(self.numbers_V, numbers_N)))

    def numbers(self, column: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The number of each id, 0 for an unknown one, and which are known."""
        places = self.places(column)
        known = places >= 0
        return np.where(known, self.numbers_V[np.maximum(places, 0)] if len(self) else 0, 0), known


def _single(array: Any) -> bool:
    return not isinstance(array, pyarrow().ChunkedArray)


def one_array(column: Any) -> Any:
    """A column without chunks and dictionaries."""
    arrow = pyarrow()
    if not _single(column):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if not _single(column):
        column = arrow.concat_arrays(column.chunks) if column.num_chunks else arrow.array([], column.type)
    return column.dictionary_decode() if arrow.types.is_dictionary(column.type) else column


def as_text(column: Any) -> Any:
    """Ids as text without the whitespace around it; whole numbers are written without a point."""
    arrow, compute = pyarrow(), pyarrow(".compute")
    column = one_array(column)
    if arrow.types.is_floating(column.type):
        column = as_integers(column, "id")
    text = compute.utf8_trim_whitespace(column.cast(arrow.string()))
    return compute.if_else(compute.equal(text, ""), arrow.scalar(None, arrow.string()), text)


def as_integers(column: Any, role: str) -> Any:
    """Whole numbers, missing ones null; another value is an error that names its row within the table."""
    arrow, compute = pyarrow(), pyarrow(".compute")
    column = one_array(column)
    if arrow.types.is_null(column.type):
        return column.cast(arrow.int64())
    if arrow.types.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), arrow.scalar(None, column.type), column)
    text = arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type)
    try:
        return (as_text(column) if text else column).cast(arrow.int64())
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError):
        values = column.to_pylist()
        wrong = next((row for row, value in enumerate(values) if not _is_whole(value)), None)
        if wrong is None and text:
            return arrow.array(
                [int(value.split(".")[0]) if value and value.strip() else None for value in values], arrow.int64()
            )
        row, value = (wrong, values[wrong]) if wrong is not None else (0, values[0] if values else None)
        raise BadRow(
            row, f"{role} {value!r} is not a whole number", f"each {role} of this model is a whole number"
        ) from None


def _is_whole(value: Any) -> bool:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return True
    if isinstance(value, str):
        return not value.strip() or _INTEGER.fullmatch(value.strip()) is not None
    return isinstance(value, float) and value.is_integer()
