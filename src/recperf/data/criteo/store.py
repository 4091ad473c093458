"""A converted click log as memory-mapped arrays, split into training and validation rows.

Every piece of an array is compared with its digest when it is first read.

Shapes: N rows, D = 13 numbers, F = 26 categories.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..blocks import Column, verified
from ..click_store.columns import open_columns
from ..click_store.rows import Rows, Split
from .config import KEYS, CriteoConfig
from .convert import LAYOUT, Conversion, Progress, convert


class CriteoStore:
    """All rows of a log by row number; the first `train_rows` are for training, the others for validation."""

    keys, slots = KEYS, (1,) * len(KEYS)

    def __init__(self, conversion: Conversion, holdout: float) -> None:
        self.conversion = conversion
        filled = [(index, part["rows"]) for index, part in enumerate(conversion.parts) if part["rows"]]
        self.rows = conversion.rows
        self.edges = np.cumsum([0] + [rows for _, rows in filled])
        parts = conversion.parts
        self.columns = [
            list(open_columns(conversion.folder, index, parts[index], LAYOUT).values()) for index, _ in filled
        ]
        if len(filled) > 1:
            self.split, self.train_rows = "last day", int(self.edges[-2])
        else:
            self.split, self.train_rows = f"last {holdout:.4g} of the rows", self.rows - round(self.rows * holdout)
        if not 0 < self.train_rows < self.rows:
            raise DataError(
                f"{self.rows:,} rows are not enough for training and validation",
                where={"path": conversion.log.path},
                fix="use a longer log, or another --data.holdout",
            )

    @staticmethod
    def open(config: CriteoConfig, *, progress: Progress | None = None) -> CriteoStore:
        """Open the store of a log; convert the log if necessary."""
        return CriteoStore(convert(config, progress=progress), config.holdout)

    def bounds(self, split: Split) -> tuple[int, int]:
        """The first row of a split and the one after its last."""
        return (0, self.train_rows) if split == "train" else (self.train_rows, self.rows)

    def count(self, split: Split) -> int:
        first, last = self.bounds(split)
        return last - first

    def rows_of(self, split: Split, first: int, last: int) -> Rows:
        """The rows of a split from its `first` to before its `last`."""
        begin, _ = self.bounds(split)
        return self.read(begin + first, begin + last)

    def take(self, split: Split, places: NDArray[np.int64]) -> Rows:
        """Single rows of a split by their position in it, in any order."""
        # In ascending order, so that reads go through the file once.
        order_N = np.argsort(places, kind="stable")
        sorted_N = places[order_N] + self.bounds(split)[0]
        cuts = np.searchsorted(sorted_N, self.edges)
        parts = [index for index in range(len(self.columns)) if cuts[index] < cuts[index + 1]]
        pieces = [
            [column[sorted_N[cuts[part] : cuts[part + 1]] - self.edges[part]] for column in self.columns[part]]
            for part in parts
        ]
        # Without rows, still arrays of each column's type.
        pieces = pieces or [[column[:0] for column in self.columns[0]]]
        rows = Rows(*(np.concatenate(columns) for columns in zip(*pieces)))
        return rows.take(np.argsort(order_N, kind="stable"))

    def read(self, first: int, last: int) -> Rows:
        """The rows first .. last - 1."""
        pieces = [[column[here] for column in columns] for columns, here in self._parts(first, last)]
        return Rows(*(np.concatenate(columns) for columns in zip(*pieces)))

    def click_rate(self, split: Split) -> float:
        """The share of the rows of a split that were clicked."""
        first, last = self.bounds(split)
        clicks = sum(int(labels[here].sum()) for (_, _, labels), here in self._parts(first, last))
        return clicks / max(1, last - first)

    def verified(self) -> dict[str, int]:
        """Bytes of the arrays that this process compared with their digests, and bytes of all of them."""
        return verified(column for columns in self.columns for column in columns)

    def _parts(self, first: int, last: int) -> Iterator[tuple[list[Column], slice]]:
        """The columns of each part that has some of these rows, and which of its rows they are."""
        part = int(np.searchsorted(self.edges, first, side="right")) - 1
        while first < last:
            begin, end = int(self.edges[part]), min(last, int(self.edges[part + 1]))
            yield self.columns[part], slice(first - begin, end - begin)
            first, part = end, part + 1


def describe(store: CriteoStore) -> dict[str, Any]:
    """Facts about the data for a result."""
    manifest = store.conversion.manifest
    skipped = store.conversion.skipped
    return {
        "name": "criteo-like" if manifest["synthetic"] else f"criteo-{manifest['layout']}",
        "digest": manifest["digest"],
        "rows": store.rows,
        "train_rows": store.train_rows,
        "valid_rows": store.rows - store.train_rows,
        "split": store.split,
        "synthetic": manifest["synthetic"],
        **({"skipped": skipped} if skipped else {}),
    }
