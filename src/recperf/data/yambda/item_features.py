"""What an import stored about items beside the events: titles and features.

Shapes: I items, V values of a feature, T stored items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import sha256
from ..rows import pyarrow
from .store import EventStore

FILE = "item_features.parquet"


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
    coded = lists.flatten().dictionary_encode()
    # The stored rows are sorted by item, so that values lie in the order of items.
    return ItemFeature(
        names=coded.dictionary.to_pylist(),
        offsets_I1=np.concatenate([[0], np.cumsum(counts_I)]),
        values_V=coded.indices.to_numpy().astype(np.int64) + 1,
    )


def titles_of(store: EventStore, numbers_N: NDArray[np.int64]) -> list[str | None] | None:
    """The titles of items by their numbers in the store; None if the import had no file of items."""
    items = read_items(store)
    return None if items is None else [items.titles[number] for number in numbers_N.tolist()]
