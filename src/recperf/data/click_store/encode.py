"""From a user's columns to stored arrays: numbers as they are, categories as codes. Imports and scoring share it.

Shapes: N rows, D numeric columns, S slots of ids: one for a categorical column, several for a multi-valued one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, closest
from ..user_files.database import column_types, fetch_row, optional_package
from .columns import Layout
from .values import categories, category, no_number, number
from .vocabulary import Vocabulary

LARGEST = 3e38
"""Numbers are stored as float32, larger ones as this."""


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """A feature of a store, as its manifest describes it."""

    name: str
    kind: Literal["categorical", "numeric", "multi"]
    missing: int
    """Rows without a value."""
    slots: int = 0
    """Most categories of a row; 0 for a number."""
    cut: int = 0
    """Categories left out because their row has more than that."""
    vocabulary: dict[str, Any] | None = None
    """File, entries and digest of the vocabulary."""
    buckets: int = 0
    """Codes of a hashed column."""
    least: float | None = None
    most: float | None = None

    def hashed(self) -> Vocabulary:
        return Vocabulary(buckets=self.buckets, seed=self.name)


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredColumns:
    """The features of a store, with a vocabulary for each of those that are not numbers."""

    facts: list[ColumnFacts]
    vocabularies: list[Vocabulary]
    """One for each of `facts`; not used for numbers."""
    separator: str

    @property
    def numeric(self) -> list[ColumnFacts]:
        return [one for one in self.facts if one.kind == "numeric"]

    @property
    def sparse(self) -> list[tuple[ColumnFacts, Vocabulary]]:
        return [pair for pair in zip(self.facts, self.vocabularies) if pair[0].kind != "numeric"]


def layout_of(facts: list[ColumnFacts], *, times: bool) -> Layout:
    """The arrays of a store with these features; a store without numbers has no array of them."""
    dense, slots = sum(one.kind == "numeric" for one in facts), sum(one.slots for one in facts)
    arrays = {"labels": ("u1", 0)}
    arrays |= {"dense": ("<f4", dense)} if dense else {}
    arrays |= {"ids": ("<i4", slots)} if slots else {}
    return Layout(arrays | ({"times": ("<i8", 0)} if times else {}))


def selection(
    columns: StoredColumns, names: Mapping[str, str], kinds: Mapping[str, str], *, trimmed: bool
) -> dict[str, str]:
    """SQL for every feature, under the name f0, f1 and so on. `names` are the columns of the SQL table by feature."""
    selected = {}
    for index, one in enumerate(columns.facts):
        column, kind = names[one.name], kinds[names[one.name]]
        column = f'"{column}"'
        if one.kind == "numeric":
            value = number(column, kind, trimmed=trimmed)
            sql = f"(CASE WHEN abs({value}) > {LARGEST} THEN sign({value}) * {LARGEST} ELSE {value} END)::FLOAT"
        elif one.kind == "multi":
            sql = categories(column, kind, columns.separator, trimmed=trimmed)
        else:
            sql = category(column, kind, trimmed=trimmed)
        selected[f"f{index}"] = sql
    return selected


def stored_arrays(columns: StoredColumns, table: Any) -> dict[str, NDArray[Any]]:
    """The arrays `dense` and `ids` of a pyarrow table with the columns of `selection`; NaN is a missing number."""
    dense, ids = [], []
    for index, (one, vocabulary) in enumerate(zip(columns.facts, columns.vocabularies)):
        column = table[f"f{index}"].combine_chunks()
        if one.kind == "numeric":
            dense.append(column.fill_null(np.nan).to_numpy(zero_copy_only=False))
        elif one.kind == "multi":
            ids.append(vocabulary.slots(column, one.slots))
        else:
            ids.append(vocabulary.codes(column)[:, None])
    rows = len(table)
    return {
        "dense": np.stack(dense, 1).astype(np.float32) if dense else np.zeros((rows, 0), np.float32),
        "ids": np.concatenate(ids, 1) if ids else np.zeros((rows, 0), np.int32),
    }


def encode_table(columns: StoredColumns, table: Any) -> dict[str, NDArray[Any]]:
    """The arrays of a pyarrow table with the user's own columns, by the same transformations as at the import."""
    duckdb = optional_package("duckdb")
    names = [str(name) for name in table.column_names]
    needed = [one.name for one in columns.facts]
    for name in needed:
        if names.count(name) != 1:
            guess = closest(name, names)
            hint = f"; did you mean {guess!r}?" if guess and name not in names else ""
            what = f"the rows have {'no' if name not in names else 'several'} column {name!r}{hint}"
            raise DataError(what, where={"columns": ", ".join(names[:20])}, fix="name the columns as at the import")
    renamed = {name: f"c{index}" for index, name in enumerate(needed)}
    arrow = optional_package("pyarrow")
    plain = arrow.table({renamed[name]: _decoded(table[name]) for name in needed})
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("batch", plain)
        kinds = column_types(connection, "batch")
        _require_numbers(connection, columns, renamed, kinds)
        selected = selection(columns, renamed, kinds, trimmed=False)
        query = ", ".join(f"{sql} AS {name}" for name, sql in selected.items())
        return stored_arrays(columns, connection.sql(f"SELECT {query} FROM batch").to_arrow_table())


def _decoded(column: Any) -> Any:
    types = optional_package("pyarrow").types
    column = column.combine_chunks()
    return column.dictionary_decode() if types.is_dictionary(column.type) else column


def _require_numbers(
    connection: Any, columns: StoredColumns, names: Mapping[str, str], kinds: Mapping[str, str]
) -> None:
    for one in columns.numeric:
        column = names[one.name]
        wrong = no_number(column, kinds[column])
        count, value = fetch_row(connection, f"SELECT count(*), min({column}::VARCHAR) FROM batch WHERE {wrong}")
        if count:
            what = f"column {one.name!r} has {count:,} values that are not numbers, such as {value!r}"
            raise DataError(what, fix="write numbers, or leave the value empty")
