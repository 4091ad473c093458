"""What is in a store of clicks, and how a user's columns become its arrays: numbers as they are, categories as codes.

Imports and scoring share it.

Shapes: N rows, D numeric columns, S slots of ids: one for a categorical column, several for a multi-valued one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, closest
from ...jsonfile import Count, Struct, read_sealed
from ..datasets import KINDS
from ..files import values as sql
from ..files.text_rows import SkippedRows
from ..files.values import NOT_USED, column_types, fetch_row
from ..split.record import moment, read
from ..tables import numbers_of, optional_package, pyarrow
from .columns import Arrays, Layout, StoredVocabulary, Vocabulary, as_text, denoted, open_arrays, read_vocabulary

FORMAT, VERSION = KINDS["clicks"].form
MANIFEST = "clicks.json"
LARGEST = 3e38
"""Numbers are stored as float32, larger ones as this."""
EARLIER, TITLES = "earlier.npz", "titles.parquet"


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """A feature of a store, as its manifest describes it."""

    name: str
    kind: Literal["categorical", "numeric", "multi"]
    missing: int
    """Rows without a value."""
    values: sql.Values = "text"
    """What its categories are, which says how they are compared."""
    slots: int = 0
    """Most categories of a row; 0 for a number."""
    cut: int = 0
    """Categories left out because their row has more than that."""
    vocabulary: StoredVocabulary | None = None
    buckets: int = 0
    """Codes of a hashed column."""
    rare: int = 0
    """Categories with fewer rows than `min_count`, which share a table row."""
    rare_share: float = 0.0
    """Of the rows."""
    least: float | None = None
    most: float | None = None

    @property
    def categories(self) -> int:
        """Most rows that a table of the column needs; 0 for a number."""
        return self.buckets or (self.vocabulary.entries if self.vocabulary else 0)

    def describe(self) -> str:
        if self.kind == "numeric":
            parts = ["numeric"] if self.least is None else ["numeric", f"{self.least:g} to {self.most:g}", "log scale"]
        elif self.vocabulary is None:
            parts = [f"categorical, hashed to {self.buckets:,} rows"]
        else:
            parts = [f"categorical, {self.vocabulary.entries:,} categories"]
            parts += [f"{self.rare:,} rare ({self.rare_share:.1%} of the rows)"] * bool(self.rare)
        parts += [f"up to {self.slots} in a row"] * (self.slots > 1)
        parts += [f"{self.cut:,} further ones left out"] * bool(self.cut)
        return ", ".join(parts + [f"{self.missing:,} missing"] * bool(self.missing))


class Label(Struct):
    """Which rows are clicks."""

    name: str
    positive_from: float | None
    positives: list[str]


class EarlierRows(Struct):
    """What a store has of another, in place of what would be fitted on its rows (earlier_ids.py)."""

    sha256: str
    """Of the file with the table row and the last time of each category."""
    added: list[int]
    """Categories of each sparse column that no row of the store has."""
    scales: list[tuple[float, float]]
    """Mean and deviation of each number."""
    indicators: list[int]
    """Numbers with a feature that says whether they are missing."""


class ClickManifest(Struct, kw_only=True, omit_defaults=True):
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
    arrays: Arrays
    digest: str
    identity: dict[str, Any]
    seconds: float
    split_note: str
    skipped_rows: SkippedRows | None = None
    repeated: int = 0
    """Rows with the user, item, time and label of an earlier row."""
    titles: str | None = None
    """SHA-256 of the file with the titles of items, where there are some."""
    earlier: EarlierRows | None = None

    @property
    def has_times(self) -> bool:
        """Whether rows have different times."""
        return self.times is not None and self.times[0] < self.times[1]

    @property
    def layout(self) -> Layout:
        """The arrays of the store; without numbers it has no array of them."""
        dense, slots = sum(one.kind == "numeric" for one in self.columns), sum(one.slots for one in self.columns)
        arrays = {"labels": ("u1", 0)}
        arrays |= {"dense": ("<f4", dense)} if dense else {}
        arrays |= {"ids": ("<i4", slots)} if slots else {}
        return arrays | ({"times": ("<i8", 0)} if self.time is not None else {})


def read_manifest(folder: Path) -> ClickManifest:
    """The description of a store; damage is one line."""
    return read_sealed(folder / MANIFEST, (FORMAT, VERSION), ClickManifest, fix=f"remove {folder} and import again")


def info(folder: Path) -> dict[str, Any]:
    """What is in a store, from its description."""
    manifest = read_manifest(folder)
    label, times = manifest.label, manifest.times
    rule = ", ".join(label.positives or ("1", "true"))
    names = (
        "name",
        "rows",
        "positives",
        "user",
        "item",
        "time",
        "left_out",
        "skipped_rows",
        "min_count",
        "repeated",
        "digest",
    )
    return {
        **{name: getattr(manifest, name) for name in (*names, "digest")},
        "folder": str(folder),
        "positive_share": manifest.positives / manifest.rows,
        "label_column": label.name,
        "label": f"a click: {rule}" if label.positive_from is None else f"a click from {label.positive_from:g} on",
        "first": moment(times[0]) if times else None,
        "last": moment(times[1]) if times else None,
        "columns": {one.name: one.describe() for one in manifest.columns},
        "store_bytes": sum(file.stat().st_size for file in folder.iterdir()),
    }


def check(folder: Path) -> dict[str, object]:
    """Compare all arrays and vocabularies with their digests; damage is an error."""
    manifest = read_manifest(folder)
    for column in open_arrays(folder, manifest.arrays, manifest.layout, manifest.rows).values():
        column.require(0, len(column))
    StoredColumns.of(folder, manifest)
    read(folder, manifest.digest)
    return {"name": manifest.name, "folder": str(folder), "intact": True, "rows": manifest.rows}


Inputs = Sequence[tuple[str, str]]
"""For each feature the column of a table in DuckDB, and its type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredColumns:
    """The features of a store, each with its vocabulary, which is not used for numbers."""

    features: list[tuple[ColumnFacts, Vocabulary]]
    separator: str

    @staticmethod
    def of(folder: Path, manifest: ClickManifest) -> StoredColumns:
        """The features of a store in a folder, which has the vocabularies."""
        vocabularies = (
            read_vocabulary(folder, one.vocabulary)
            if one.vocabulary
            else Vocabulary(buckets=one.buckets, seed=one.name)
            for one in manifest.columns
        )
        return StoredColumns(features=list(zip(manifest.columns, vocabularies)), separator=manifest.separator)

    @property
    def numeric(self) -> list[ColumnFacts]:
        return [one for one, _ in self.features if one.kind == "numeric"]

    @property
    def sparse(self) -> list[tuple[ColumnFacts, Vocabulary]]:
        return [pair for pair in self.features if pair[0].kind != "numeric"]


def selection(columns: StoredColumns, inputs: Inputs, table: str, *, more: Mapping[str, str] | None = None) -> str:
    """The query for every feature of a table, under the name f0, f1 and so on, categories as keys. `more` is SQL for
    further columns by their name."""
    texts, selected = dict(more or {}), {name: name for name in more or {}}
    for index, ((one, _), (column, kind)) in enumerate(zip(columns.features, inputs)):
        name = f"f{index}"
        selected[name] = name
        if one.kind == "numeric":
            texts[name] = sql.number(column, kind)
        elif one.kind == "multi":
            texts[name] = sql.categories(column, kind, columns.separator)
            selected[name] = sql.keys(name, one.values)
        else:
            texts[name], selected[name] = sql.category(column, kind), sql.key(name, one.values)
    outer, inner = (", ".join(f"{text} AS {name}" for name, text in part.items()) for part in (selected, texts))
    return f"SELECT {outer} FROM (SELECT {inner} FROM {table})"


def stored_arrays(columns: StoredColumns, table: Any) -> dict[str, NDArray[Any]]:
    """The arrays `dense` and `ids` of a pyarrow table with the columns of `selection`; NaN is a missing number."""
    dense, ids = [], []
    for index, (one, vocabulary) in enumerate(columns.features):
        column = table[f"f{index}"].combine_chunks()
        if one.kind == "numeric":
            numbers = numbers_of(column.fill_null(np.nan))
            dense.append(np.clip(numbers, -LARGEST, LARGEST).astype(np.float32))
        elif one.kind == "multi":
            ids.append(vocabulary.slots(column, one.slots))
        else:
            ids.append(vocabulary.codes(column)[:, None])
    rows = len(table)
    return {
        "dense": np.stack(dense, 1) if dense else np.zeros((rows, 0), np.float32),
        "ids": np.concatenate(ids, 1) if ids else np.zeros((rows, 0), np.int32),
    }


def encode_table(columns: StoredColumns, table: Any) -> dict[str, NDArray[Any]]:
    """The arrays of a pyarrow table with the user's own columns, by the same transformations as at the import."""
    duckdb, arrow = optional_package("duckdb"), pyarrow()
    names, needed = [str(name) for name in table.column_names], [one.name for one, _ in columns.features]
    for name in needed:
        if names.count(name) != 1:
            guess = closest(name, names)
            hint = f"; did you mean {guess!r}?" if guess and name not in names else ""
            what = f"the rows have {'no' if name not in names else 'several'} column {name!r}{hint}"
            raise DataError(what, where={"columns": ", ".join(names[:20])}, fix="name the columns as at the import")
    # A user's names never become SQL.
    plain = arrow.table({f"c{at}": _decoded(table[name]) for at, name in enumerate(needed)})
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"SET disabled_optimizers = {NOT_USED}")
        try:
            connection.register("untrimmed", plain)
            inputs = list(column_types(connection, "untrimmed").items())
        except duckdb.NotImplementedException as error:
            raise DataError(f"a column has a type that cannot be read: {error}", fix="write it as text") from None
        trimmed = (f"{sql.stripped(name) if sql.is_text(kind) else name} AS {name}" for name, kind in inputs)
        connection.execute(f"CREATE TEMP VIEW batch AS SELECT {', '.join(trimmed)} FROM untrimmed")
        compared = [_compared(connection, *pair, *one) for pair, one in zip(columns.features, inputs)]
        columns = replace(columns, features=compared)
        query = selection(columns, inputs, "batch")
        return stored_arrays(columns, connection.sql(query).to_arrow_table())


def _decoded(column: Any) -> Any:
    arrow, column = pyarrow(), column.combine_chunks()
    column = column.dictionary_decode() if arrow.types.is_dictionary(column.type) else column
    return column.cast(arrow.float32()) if arrow.types.is_float16(column.type) else column


def require_categories(connection: Any, table: str, one: ColumnFacts, column: str, kind: str) -> sql.Values:
    """What the categories of a column are by its type. Refuses a type that has none, and numbers that were rounded."""
    values, several = sql.values_of(sql.element(kind)), sql.is_list(kind)
    if values is None or (several and one.kind == "categorical"):
        fix = f"--multi {one.name}" if values and several else "write it as text, or leave it out"
        raise DataError(f"column {one.name!r} has the type {kind}, which cannot be a category", fix=fix)
    value = f"unnest({column}::{sql.element(kind)}[])" if several else column
    rounded = sql.inexact("value", sql.element(kind))
    query = f"SELECT max(value) FROM (SELECT {value} AS value FROM {table}) WHERE {rounded}"
    if rounded != "false" and (largest := fetch_row(connection, query)[0]) is not None:
        what = f"column {one.name!r} has floating-point numbers like {largest:.0f}, which may be rounded ids"
        raise DataError(what, fix=f"write whole numbers, or {as_text(one.name)}")
    return values


def _compared(
    connection: Any, one: ColumnFacts, vocabulary: Vocabulary, column: str, kind: str
) -> tuple[ColumnFacts, Vocabulary]:
    """A feature and its vocabulary as values of a type are compared with them. Refuses values that cannot be."""
    if one.kind == "numeric":
        wrong = sql.no_number(column, kind)
        count, value = fetch_row(connection, f"SELECT count(*), min({column}::VARCHAR) FROM batch WHERE {wrong}")
        if count:
            what = f"column {one.name!r} has {count:,} values that are not numbers, such as {value!r}"
            raise DataError(what, fix="write numbers, or leave the value empty")
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
