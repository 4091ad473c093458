"""From a user's columns to stored arrays: numbers as they are, categories as codes. Imports and scoring share it.

Shapes: N rows, D numeric columns, S slots of ids: one for a categorical column, several for a multi-valued one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, closest
from ...jsonfile import Count, Struct, read_sealed
from ..datasets import KINDS
from ..rows import optional_package, pyarrow
from ..user_files.database import NOT_USED, column_types, fetch_row
from ..user_files.text_rows import SkippedRows
from ..user_files.values import (
    Values,
    categories,
    category,
    element,
    inexact,
    is_list,
    key,
    keys,
    no_number,
    number,
    values_of,
)
from .columns import Layout, StoredPart
from .vocabulary import StoredVocabulary, Vocabulary, as_text, denoted, read_vocabulary

FORMAT, VERSION = KINDS["clicks"].form
MANIFEST = "clicks.json"
LARGEST = 3e38
"""Numbers are stored as float32, larger ones as this."""


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """A feature of a store, as its manifest describes it."""

    name: str
    kind: Literal["categorical", "numeric", "multi"]
    missing: int
    """Rows without a value."""
    values: Values = "text"
    """What its categories are, which says how they are compared."""
    slots: int = 0
    """Most categories of a row; 0 for a number."""
    cut: int = 0
    """Categories left out because their row has more than that."""
    vocabulary: StoredVocabulary | None = None
    buckets: int = 0
    """Codes of a hashed column."""
    least: float | None = None
    most: float | None = None

    @property
    def categories(self) -> int:
        """Most rows that a table of the column needs; 0 for a number."""
        return self.buckets or (self.vocabulary.entries if self.vocabulary else 0)


class Label(Struct):
    """Which rows are clicks."""

    name: str
    positive_from: float | None
    positives: list[str]


class Manifest(Struct, kw_only=True, omit_defaults=True):
    """The description of a store."""

    format: str
    version: int
    name: str
    rows: Count
    positives: Count
    label: Label
    columns: list[ColumnFacts]
    separator: str
    user: str | None
    item: str | None
    time: str | None
    times: tuple[int, int] | None
    left_out: dict[str, str]
    min_count: Count
    scale: Literal["log", "quantile"]
    parts: tuple[StoredPart]
    digest: str
    identity: dict[str, Any]
    seconds: float
    split_note: str
    skipped_rows: SkippedRows | None = None

    @property
    def layout(self) -> Layout:
        return layout_of(self.columns, times=self.times is not None)


def read_manifest(folder: Path) -> Manifest:
    """The description of a store; damage is one line."""
    return read_sealed(folder / MANIFEST, (FORMAT, VERSION), Manifest, fix=f"remove {folder} and import again")


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredColumns:
    """The features of a store, with a vocabulary for each of those that are not numbers."""

    facts: list[ColumnFacts]
    vocabularies: list[Vocabulary]
    """One for each of `facts`; not used for numbers."""
    separator: str

    @classmethod
    def of(cls, folder: Path, facts: list[ColumnFacts], separator: str) -> StoredColumns:
        """The features of a store in a folder, which has the vocabularies."""
        vocabularies = [
            read_vocabulary(folder, one.vocabulary)
            if one.vocabulary
            else Vocabulary(buckets=one.buckets, seed=one.name)
            for one in facts
        ]
        return cls(facts=facts, vocabularies=vocabularies, separator=separator)

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
    columns: StoredColumns,
    names: Mapping[str, str],
    kinds: Mapping[str, str],
    table: str,
    *,
    trimmed: bool,
    more: Mapping[str, str] | None = None,
) -> str:
    """The query for every feature of a table, under the name f0, f1 and so on, categories as keys. `names` are the
    columns of the table by feature, `more` is SQL for further columns by their name."""
    texts, selected = dict(more or {}), {name: name for name in more or {}}
    for index, one in enumerate(columns.facts):
        column, kind, name = f'"{names[one.name]}"', kinds[names[one.name]], f"f{index}"
        selected[name] = name
        if one.kind == "numeric":
            value = number(column, kind, trimmed=trimmed)
            texts[name] = f"(CASE WHEN abs({value}) > {LARGEST} THEN sign({value}) * {LARGEST} ELSE {value} END)::FLOAT"
        elif one.kind == "multi":
            texts[name] = categories(column, kind, columns.separator, trimmed=trimmed)
            selected[name] = keys(name, one.values)
        else:
            texts[name], selected[name] = category(column, kind, trimmed=trimmed), key(name, one.values)
    outer, inner = (", ".join(f"{sql} AS {name}" for name, sql in part.items()) for part in (selected, texts))
    return f"SELECT {outer} FROM (SELECT {inner} FROM {table})"


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
    arrow = pyarrow()
    plain = arrow.table({renamed[name]: _decoded(table[name]) for name in needed})
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"SET disabled_optimizers = {NOT_USED}")
        try:
            connection.register("batch", plain)
            kinds = column_types(connection, "batch")
        except duckdb.NotImplementedException as error:
            raise DataError(f"a column has a type that cannot be read: {error}", fix="write it as text") from None
        _require_numbers(connection, columns, renamed, kinds)
        compared = [
            _compared(connection, *pair, renamed[pair[0].name], kinds[renamed[pair[0].name]])
            for pair in zip(columns.facts, columns.vocabularies)
        ]
        facts, vocabularies = map(list, zip(*compared))
        columns = replace(columns, facts=facts, vocabularies=vocabularies)
        query = selection(columns, renamed, kinds, "batch", trimmed=False)
        return stored_arrays(columns, connection.sql(query).to_arrow_table())


def _decoded(column: Any) -> Any:
    arrow, column = pyarrow(), column.combine_chunks()
    column = column.dictionary_decode() if arrow.types.is_dictionary(column.type) else column
    return column.cast(arrow.float32()) if arrow.types.is_float16(column.type) else column


def require_categories(connection: Any, table: str, one: ColumnFacts, column: str, kind: str) -> Values:
    """What the categories of a column are by its type. Refuses a type that has none, and numbers that were rounded."""
    values, several = values_of(element(kind)), is_list(kind)
    if values is None or (several and one.kind == "categorical"):
        fix = f"--multi {one.name}" if values and several else "write it as text, or leave it out"
        raise DataError(f"column {one.name!r} has the type {kind}, which cannot be a category", fix=fix)
    value = f"unnest({column}::{element(kind)}[])" if several else column
    rounded = inexact("value", element(kind))
    query = f"SELECT max(value) FROM (SELECT {value} AS value FROM {table}) WHERE {rounded}"
    if rounded != "false" and (largest := fetch_row(connection, query)[0]) is not None:
        what = f"column {one.name!r} has floating-point numbers like {largest:.0f}, which may be rounded ids"
        raise DataError(what, fix=f"write whole numbers, or {as_text(one.name)}")
    return values


def _compared(
    connection: Any, one: ColumnFacts, vocabulary: Vocabulary, column: str, kind: str
) -> tuple[ColumnFacts, Vocabulary]:
    """A feature and its vocabulary as values of a type are compared with them."""
    if one.kind == "numeric":
        return one, vocabulary
    values = require_categories(connection, "batch", one, column, kind)
    example = None if values in ("text", one.values) else fetch_row(connection, f"SELECT max({column}) FROM batch")[0]
    if example is None:
        return one, vocabulary
    if one.values != "text" or vocabulary.values is None:
        seen = "hashed text" if one.values == "text" else f"{one.values}s"
        raise DataError(
            f"column {one.name!r} has {values}s like {example}; the import saw {seen}", fix=as_text(one.name)
        )
    return replace(one, values=values), denoted(vocabulary, values, one.name)


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
