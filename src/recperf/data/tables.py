"""Rows of a user: in memory as a model reads them, or as pyarrow tables, in blocks, with own ids as numbers.

Shapes: N rows, D numbers, S slots of ids (one for each id a row can have).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, MachineError, closest, shorten_middle

Table = Any
"""A pyarrow.Table."""
MOST_EXAMPLES = 3
FEW_IDS = 1 << 13
"""Ids that are looked up one by one among those in ascending order."""
EMPTY = -1
"""In the slots of a feature with several ids: no id."""
Split = Literal["train", "valid", "fit", "choose"]
"""Training and held-out rows; of the training rows those that steps are made of, and those that choose the epoch."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some click rows, copied into memory."""

    dense_ND: NDArray[np.float32]
    ids_NS: NDArray[np.int32]
    labels_N: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, order_N: NDArray[np.int64]) -> Rows:
        """The same rows in another order."""
        return Rows(self.dense_ND.take(order_N, axis=0), self.ids_NS.take(order_N, axis=0), self.labels_N.take(order_N))


class SplitRows(ABC):
    """Click rows by their position within the rows of a split."""

    keys: tuple[str, ...]
    slots: tuple[int, ...]
    index: dict[Split, NDArray[np.int64]]
    """The rows of each split, ascending."""

    @abstractmethod
    def _at(self, index: NDArray[np.int64]) -> Rows:
        """Rows by ascending numbers."""

    def count(self, split: Split) -> int:
        return len(self.index[split])

    def rows_of(self, split: Split, first: int, last: int) -> Rows:
        return self._at(self.index[split][first:last])

    def take(self, split: Split, positions_N: NDArray[np.int64]) -> Rows:
        """Single rows, in any order."""
        distinct, where = np.unique(positions_N, return_inverse=True)
        return self._at(self.index[split][distinct]).take(where)

    def every(self, split: Split, step: int) -> Rows:
        return self._at(self.index[split][::step])


class MemoryRows(SplitRows):
    """Rows in memory as the only split."""

    def __init__(self, keys: tuple[str, ...], slots: tuple[int, ...], rows: Rows) -> None:
        self.keys, self.slots, self.rows = keys, slots, rows
        self.index = {"valid": np.arange(len(rows))}

    def _at(self, index: NDArray[np.int64]) -> Rows:
        return self.rows.take(index)


def optional_package(name: str) -> Any:
    """Import a package that only some commands need; without it, name it."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        what = f"reading and writing data needs the package {package}"
        raise MachineError(what, fix=f"pip install {package}") from None


def pyarrow(part: str = "") -> Any:
    """Import pyarrow or a part of it."""
    return optional_package(f"pyarrow{part}")


class BadRow(DataError):
    """A value that a model cannot read; `row` counts from 0 in the table."""

    def __init__(self, row: int, what: str, fix: str) -> None:
        super().__init__(f"row {row + 1:,}: {what}", fix=fix)
        self.row, self.value = row, what

    def after(self, rows: int, path: Path) -> DataError:
        """The same error of a table that follows `rows` rows of a file."""
        return DataError(f"row {rows + self.row + 1:,}: {self.value}", where={"file": path}, fix=self.fix)


def numbers_of(column: Any) -> NDArray[Any]:
    """The numbers or booleans of a column without nulls. What to_numpy does as well, but it imports pandas."""
    arrow, column = pyarrow(), one_array(column)
    if arrow.types.is_boolean(column.type):
        return np.from_dlpack(column.cast(arrow.uint8())).astype(np.bool_)
    return np.from_dlpack(column)


def in_blocks(tables: Iterable[Table], size: int) -> Iterator[Table]:
    """The same rows in tables of `size` rows."""
    arrow = pyarrow()
    begun: list[Table] = []
    rows = 0
    for table in tables:
        begun.append(table)
        rows += len(table)
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


@dataclass(frozen=True)
class Unknown:
    """Rows whose id, in some column, the data of a model has never had."""

    rows: int
    examples: tuple[str, ...] = ()

    @staticmethod
    def of(unknown_N: NDArray[np.bool_], column: Any) -> Unknown:
        first = one_array(column).take(pyarrow().array(np.flatnonzero(unknown_N)[:1000])).to_pylist()
        shown = dict.fromkeys(shorten_middle(repr(value), 60) for value in first)
        return Unknown(int(unknown_N.sum()), tuple(shown)[:MOST_EXAMPLES])


def add_unknown(total: Mapping[str, Unknown], more: Mapping[str, Unknown]) -> dict[str, Unknown]:
    """Unknown rows by column, of two parts of a table together."""
    joined = dict(total)
    for column, one in more.items():
        before = total.get(column, Unknown(0))
        examples = tuple(dict.fromkeys([*before.examples, *one.examples]))[:MOST_EXAMPLES]
        joined[column] = Unknown(before.rows + one.rows, examples)
    return joined


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

    def indices(self, column: Any) -> NDArray[np.int64]:
        """Where in `values` each id of a column is; -1 for one that is missing or unknown. A number means the one id
        that denotes it."""
        compute, arrow, column, values = pyarrow(".compute"), pyarrow(), one_array(column), self.values
        if self.text and is_text(column):
            column = as_text(column)
            if len(column) <= FEW_IDS:
                return self._found(column.to_pylist())
        else:
            column, (values, repeated) = whole_numbers(column, self.role), self._whole
            several = column.filter(compute.is_in(column, value_set=repeated))
            if len(several):
                same = self.values.filter(compute.equal(values, several[0])).to_pylist()[:2]
                what = f"{self.role} {several[0]} may be {same[0]!r} or {same[1]!r}"
                raise DataError(what, fix=f"give each {self.role} as text")
            if len(column) <= FEW_IDS:
                return self._found_numbers(column)
        # It arranges all ids anew at each call.
        indices = compute.fill_null(compute.index_in(column, value_set=values, skip_nulls=True), -1)
        return np.asarray(indices.cast(arrow.int64()))

    def _found(self, texts: list[str | None]) -> NDArray[np.int64]:
        ascending, places_V = self._texts
        found = []
        for text in texts:
            at = 0 if text is None else bisect_left(range(len(places_V)), text, key=lambda at: ascending[at].as_py())
            there = text is not None and at < len(places_V) and ascending[at].as_py() == text
            found.append(int(places_V[at]) if there else -1)
        return np.array(found, np.int64)

    def _found_numbers(self, column: Any) -> NDArray[np.int64]:
        numbers_V, places_V = self._ascending
        if not len(places_V):
            return np.full(len(column), -1)
        asked_N, valid_N = column.fill_null(0).to_numpy(), np.asarray(column.is_valid())
        at_N = np.searchsorted(numbers_V, asked_N).clip(max=len(places_V) - 1)
        return np.where(valid_N & (numbers_V[at_N] == asked_N), places_V[at_N], -1)

    @cached_property
    def _texts(self) -> tuple[Any, NDArray[np.int64]]:
        return _ascending(self.values)

    @cached_property
    def _ascending(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        values, places_V = _ascending(self._whole[0])
        return values.to_numpy(), places_V

    @cached_property
    def _whole(self) -> tuple[Any, Any]:
        """The whole number that each id denotes, null for none, and those that several ids denote."""
        values = whole_numbers(self.values, self.role)
        counts = values.drop_null().value_counts()
        return values, counts.field("values").filter(pyarrow(".compute").greater(counts.field("counts"), 1))

    def of_numbers(self, numbers_N: NDArray[np.int64]) -> Any:
        """The own ids of numbers, all of which are known; the numbers of `values` must ascend."""
        return self.values.take(pyarrow().array(np.searchsorted(self.numbers_V, numbers_N)))

    def numbers(self, column: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The number of each id, 0 for an unknown one, and which are known."""
        indices = self.indices(column)
        known = indices >= 0
        return np.where(known, self.numbers_V[np.maximum(indices, 0)] if len(self) else 0, 0), known


def _ascending(values: Any) -> tuple[Any, NDArray[np.int64]]:
    """The values but null in ascending order, the first of equal ones first, and the place of each."""
    order_V = pyarrow(".compute").sort_indices(values)[: len(values) - values.null_count]
    return values.take(order_V), np.asarray(order_V).astype(np.int64)


def one_array(column: Any) -> Any:
    """A column without chunks and dictionaries."""
    arrow = pyarrow()
    if isinstance(column, arrow.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column.dictionary_decode() if arrow.types.is_dictionary(column.type) else column


def is_text(column: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(column.type) or types.is_large_string(column.type) or types.is_string_view(column.type))


def as_text(column: Any) -> Any:
    """Text without the whitespace around it, null where nothing is left."""
    arrow, compute = pyarrow(), pyarrow(".compute")
    text = compute.utf8_trim_whitespace(one_array(column).cast(arrow.string()))
    return compute.if_else(compute.equal(text, ""), arrow.scalar(None, arrow.string()), text)


def whole_numbers(column: Any, role: str) -> Any:
    """The whole numbers of a column, which may be written with a point; null for other numbers, text and missing
    values. Refuses other types, and numbers that were rounded."""
    arrow, compute, column = pyarrow(), pyarrow(".compute"), one_array(column)
    types = arrow.types
    if types.is_floating(column.type):
        column = column.cast(arrow.float64())
        rounded = column.filter(compute.greater_equal(compute.abs(column), 2.0**53))
        if len(rounded):
            what = f"{role} {rounded[0].as_py():.0f} is a floating-point number that may be a rounded id"
            raise DataError(what, fix=f"give each {role} as a whole number or as text")
        whole = compute.equal(column, compute.floor(column))
        return compute.if_else(whole, column, arrow.scalar(None, column.type)).cast(arrow.int64())
    if types.is_integer(column.type) and not types.is_uint64(column.type):
        return column.cast(arrow.int64())
    if not (is_text(column) or types.is_integer(column.type) or types.is_decimal(column.type)):
        if types.is_null(column.type):
            return column.cast(arrow.int64())
        raise DataError(
            f"{role}: a column of type {column.type} has no ids", fix="give ids as whole numbers or as text"
        )
    text = as_text(column)
    parts = compute.extract_regex(text, r"^[+]?(?P<sign>-?)0*(?P<digits>[0-9]{1,19})(?:\.0*)?$")
    sign, digits = (compute.struct_field(parts, name) for name in ("sign", "digits"))
    fits = compute.or_(compute.less(compute.utf8_length(digits), 19), compute.less_equal(digits, str(2**63 - 1)))
    digits = compute.if_else(
        fits, compute.binary_join_element_wise(sign, digits, ""), arrow.scalar(None, arrow.string())
    )
    return digits.cast(arrow.int64())
