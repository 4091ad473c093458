"""What a store says of its items and users besides events: titles, and columns by the user's own names.

Shapes: I items, V values of a column, K most values of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import sha256
from ..tables import pyarrow
from .manifest import SideKind, SideTableFacts
from .options import SideRole
from .store import CONTEXT, EventStore

MOST_VALUES = 32
"""Values of an item that a model reads, the first ones of its columns."""


@dataclass(frozen=True, eq=False)
class ItemColumn:
    """A column of items or users by their numbers in the store, as an array of pyarrow: category and text are text or
    numbers, categories lists of text, number doubles. Items of which nothing is known have null."""

    kind: SideKind
    values: Any
    edges: tuple[float, ...] = ()
    """Of a number: where one range of it ends and the next begins."""

    def categories(self) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
        """The different categories of a column in order, how many each item has, and which: one number a value, from 0
        on, item after item. A number has its ranges as categories."""
        arrow, compute, values = pyarrow(), pyarrow(".compute"), self.values
        if self.kind == "number":
            return self._ranges()
        if self.kind == "categories":
            counts_I = np.asarray(compute.fill_null(compute.list_value_length(values), 0), np.int64)
            values = compute.list_flatten(values)
        else:
            counts_I = np.asarray(compute.is_valid(values)).astype(np.int64)
        present = compute.drop_null(values)
        if arrow.types.is_integer(present.type):
            distinct, numbers_V = np.unique(np.asarray(present), return_inverse=True)
            return [str(one) for one in distinct.tolist()], counts_I, numbers_V.astype(np.int64)
        names, numbers_V = np.unique(np.asarray(present.to_numpy(zero_copy_only=False), str), return_inverse=True)
        return names.tolist(), counts_I, numbers_V.astype(np.int64)

    def _ranges(self) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
        numbers_I = np.asarray(pyarrow(".compute").fill_null(self.values, np.nan))
        there_I = ~np.isnan(numbers_I)
        ends = [f"{edge:.10g}" for edge in self.edges]
        names = [f"below {ends[0]}", *(f"{low} to {high}" for low, high in zip(ends, ends[1:])), f"from {ends[-1]} on"]
        return names, there_I.astype(np.int64), np.searchsorted(self.edges, numbers_I[there_I], side="right")


def table_facts(store: EventStore, role: SideRole = "item") -> SideTableFacts | None:
    """What the import stored of items or users; None if nothing."""
    return store.imported.tables.get(role) if store.imported else None


def columns_of(store: EventStore, role: SideRole = "item") -> dict[str, ItemColumn]:
    """The columns of items or users by the user's names, without titles."""
    facts, table = table_facts(store, role), _table(store, role)
    if facts is None or table is None:
        columns = zip(store.manifest.groups if role == "item" else [], store.groups_IG.astype(np.int64).T)
        return {name: ItemColumn("category", pyarrow().array(ids_I, mask=ids_I == 0)) for name, ids_I in columns}
    return {
        one.name: ItemColumn(one.kind, table.column(f"v{at}").combine_chunks(), tuple(one.edges))
        for at, one in enumerate(facts.columns)
    }


def titles_of(store: EventStore, numbers_N: NDArray[np.int64]) -> list[str | None] | None:
    """The titles of items by their numbers in the store; None if the import had none."""
    facts, table = table_facts(store), _table(store, "item")
    if facts is None or table is None or facts.title is None:
        return None
    titles: list[str | None] = table.column("title").take(pyarrow().array(numbers_N)).to_pylist()
    return titles


def exported(store: EventStore, name: str, ids: Any, numbers_N: NDArray[np.int64]) -> Any:
    """What is known of items by the user's names, as a table with their ids in the column `name`; None if nothing."""
    facts, table = table_facts(store), _table(store, "item")
    if facts is None or table is None:
        return None
    names = {f"v{at}": column.name for at, column in enumerate(facts.columns)} | {"title": facts.title or ""}
    rows = table.take(pyarrow().array(numbers_N))
    others = {names[column]: rows.column(column) for column in rows.column_names}
    return pyarrow().table({name: ids, **{other: values for other, values in others.items() if other != name}})


def _table(store: EventStore, role: SideRole) -> Any:
    """The stored table with a row for every number in the store; None if the import had none."""
    facts = table_facts(store, role)
    if facts is None:
        return None
    path = require_file(store, f"{role}s.parquet", facts.sha256)
    table = pyarrow(".parquet").read_table(str(path))
    rows = np.full(store.items if role == "item" else store.originals["users"].lines + 1, -1)
    rows[table.column("number").to_numpy()] = np.arange(len(table))
    return table.drop_columns("number").take(pyarrow().array(rows, mask=rows < 0))


def require_file(store: EventStore, name: str, digest: str) -> Path:
    """The path of a file beside the columns of a store. Refuses one that is not as it was written."""
    path = store.folder / name
    if not path.is_file() or sha256(path) != digest:
        what = f"the event store is damaged: {name} is not the file that was written"
        raise DataError(what, where={"file": path}, fix=f"remove {store.folder} and import it again")
    return path


def check_files(store: EventStore) -> list[str]:
    """Compare the tables and the context of a store with their digests; returns the names of the files."""
    facts = store.imported
    files = {f"{role}s.parquet": table.sha256 for role, table in facts.tables.items()} if facts else {}
    if facts and facts.context and facts.context.columns:
        files[CONTEXT] = facts.context.sha256
    return [require_file(store, name, digest).name for name, digest in files.items()]


@dataclass(frozen=True, eq=False)
class ItemValues:
    """The values of every item as rows of one table: an item's vector is the sum of its rows by their weights."""

    names: list[str]
    """Column and value of each row of the table from 1 on; row 0 stands for no value."""
    rows_IK: NDArray[np.int64]
    weights_IK: NDArray[np.float32]
    """1 over the item's number of values of the same column; 0 where it has fewer than K values."""

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self.names) + 1


def item_values(store: EventStore) -> ItemValues | None:
    """The categories and ranges of numbers of items; None if there are none that items share."""
    names, parts = list[str](), []
    for name, column in columns_of(store).items():
        if column.kind == "text" or (column.kind == "number" and not column.edges):
            continue
        values, counts_I, numbers_V = column.categories()
        if not 0 < len(values) <= store.items / 2:
            continue
        items_V = np.repeat(np.arange(store.items), counts_I)
        parts.append((items_V, numbers_V + len(names) + 1, 1 / counts_I[items_V]))
        names += [f"{name}: {value}" for value in values]
    if not parts:
        return None
    items_V, rows_V, weights_V = (np.concatenate(columns) for columns in zip(*parts))
    order_V = np.argsort(items_V, kind="stable")
    counts_I = np.bincount(items_V, minlength=store.items)
    ranks_V = np.arange(len(items_V)) - np.repeat(np.cumsum(counts_I) - counts_I, counts_I)
    most = min(MOST_VALUES, int(counts_I.max()))
    order_V, ranks_V = order_V[ranks_V < most], ranks_V[ranks_V < most]
    rows_IK, weights_IK = np.zeros((store.items, most), np.int64), np.zeros((store.items, most), np.float32)
    rows_IK[items_V[order_V], ranks_V] = rows_V[order_V]
    weights_IK[items_V[order_V], ranks_V] = weights_V[order_V]
    return ItemValues(names, rows_IK, weights_IK)
