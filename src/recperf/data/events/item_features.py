"""What an import stored about items beside the events: titles and features.

Shapes: I items, V values of a feature, T stored items, K most values of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import sha256
from ..tables import pyarrow
from .store import EventStore, originals

FILE = "item_features.parquet"
MOST_VALUES = 32
"""Values of an item that a model reads, the first ones of its features."""


@dataclass(frozen=True, eq=False)
class ItemFeatures:
    """Titles and features of the items of a store, by the item's number in the store."""

    titles: list[str | None]
    features: dict[str, ItemFeature]


@dataclass(frozen=True, eq=False)
class ItemFeature:
    """The values of one feature: those of item i are `values_V[offsets_I1[i] : offsets_I1[i + 1]]`."""

    names: list[str]
    """Value k + 1 is `names[k]`; 0 is left for items without a value."""
    offsets_I1: NDArray[np.int64]
    values_V: NDArray[np.int64]

    def texts(self, mark: str) -> list[str | None]:
        """The values of every item, with a mark between them; None where it has none."""
        values, ends = [self.names[value - 1] for value in self.values_V.tolist()], self.offsets_I1.tolist()
        return [mark.join(values[begin:end]) or None for begin, end in zip(ends, ends[1:])]


def read_items(store: EventStore) -> ItemFeatures | None:
    """What the import stored about items; None if it had no file of items."""
    stored = store.imported and store.imported.item_file
    if not stored:
        return None
    path = store.folder / FILE
    if not path.is_file() or sha256(path) != stored.sha256:
        what = f"the event store is damaged: {FILE} is not the file that was written"
        raise DataError(what, where={"file": path}, fix=f"remove {store.folder} and import it again")
    table = pyarrow(".parquet").read_table(str(path))
    rows_T = table.column("item").to_numpy()
    titles: list[str | None] = [None] * store.items
    for row, title in zip(rows_T.tolist(), table.column("title").to_pylist()):
        titles[row] = title
    features = {
        name: _feature(table.column(f"feature {at}"), rows_T, store.items) for at, name in enumerate(stored.features)
    }
    return ItemFeatures(titles, features)


def _feature(column: Any, rows_T: NDArray[np.int64], items: int) -> ItemFeature:
    lists = column.combine_chunks()
    counts_I = np.zeros(items, np.int64)
    counts_I[rows_T] = np.diff(lists.offsets.to_numpy())
    # The stored rows are sorted by item, so that values lie in the order of items.
    names, values_V = np.unique(lists.flatten().to_numpy(zero_copy_only=False).astype(str), return_inverse=True)
    return ItemFeature(names.tolist(), np.concatenate([[0], np.cumsum(counts_I)]), values_V.astype(np.int64) + 1)


def titles_of(store: EventStore, numbers_N: NDArray[np.int64]) -> list[str | None] | None:
    """The titles of items by their numbers in the store; None if the import had no file of items."""
    items = read_items(store)
    return None if items is None else [items.titles[number] for number in numbers_N.tolist()]


@dataclass(frozen=True, eq=False)
class ItemValues:
    """The values of every item as rows of one table: an item's vector is the sum of its rows by their weights."""

    names: list[str]
    """Feature and value of each row of the table from 1 on; row 0 stands for no value."""
    rows_IK: NDArray[np.int64]
    weights_IK: NDArray[np.float32]
    """1 over the item's number of values of the same feature; 0 where it has fewer than K values."""

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self.names) + 1


def item_values(store: EventStore) -> ItemValues | None:
    """The features that the import stored, or else artist and album; None if there are none that items share."""
    stored = read_items(store)
    groups = {} if stored else dict(zip(("artists", "albums"), store.catalogue_I2.T))
    of_groups = {role: _of_catalogue(store, role, ids_I) for role, ids_I in groups.items()}
    features = stored.features if stored else of_groups
    names, parts = list[str](), []
    for of, feature in features.items():
        counts_I = np.diff(feature.offsets_I1)
        if not 0 < len(feature.names) <= store.items / 2:
            continue
        items_V = np.repeat(np.arange(store.items), counts_I)
        parts.append((items_V, feature.values_V + len(names), 1 / counts_I[items_V]))
        names += [f"{of}: {name}" for name in feature.names]
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


def _of_catalogue(store: EventStore, role: str, ids_I: NDArray[np.uint32]) -> ItemFeature:
    """A column of the catalogue; its id 0 is no value."""
    values, index_I = np.unique(ids_I, return_inverse=True)
    known_I = ids_I > 0
    listed = originals(store.folder, role) if role in store.originals else None
    names = [str(listed[value - 1] if listed else value) for value in values.tolist() if value]
    numbers_V = index_I[known_I] + int(values[0] > 0)
    return ItemFeature(names, np.concatenate([[0], np.cumsum(known_I)]), numbers_V.astype(np.int64))
