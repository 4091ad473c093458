"""A converted click log as memory-mapped arrays, split into training and validation rows.

Shapes: N rows, D = 13 numbers, F = 26 categories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from .config import DENSE, SPARSE, CriteoConfig
from .convert import Conversion, Progress, column_name, convert

Split = Literal["train", "valid"]


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a log, copied into memory."""

    dense_ND: NDArray[np.float32]
    ids_NF: NDArray[np.int32]
    labels_N: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, order_N: NDArray[np.int64]) -> Rows:
        """The same rows in another order."""
        return Rows(self.dense_ND.take(order_N, axis=0), self.ids_NF.take(order_N, axis=0), self.labels_N.take(order_N))


class CriteoStore:
    """All rows of a log by row number; the first `train_rows` are for training, the others for validation."""

    def __init__(self, conversion: Conversion, holdout: float) -> None:
        self.conversion = conversion
        filled = [(index, part["rows"]) for index, part in enumerate(conversion.parts) if part["rows"]]
        self.rows = conversion.rows
        self.edges = np.cumsum([0] + [rows for _, rows in filled])
        self.maps = [_maps(conversion, index, rows) for index, rows in filled]
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

    def read(self, first: int, last: int) -> Rows:
        """The rows first .. last - 1."""
        return Rows(*(np.concatenate(columns) for columns in zip(*self._pieces(first, last))))

    def click_rate(self, split: Split) -> float:
        """The share of the rows of a split that were clicked."""
        first, last = self.bounds(split)
        return sum(int(labels_N.sum()) for _, _, labels_N in self._pieces(first, last)) / max(1, last - first)

    def _pieces(self, first: int, last: int) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        part = int(np.searchsorted(self.edges, first, side="right")) - 1
        while first < last:
            begin, end = int(self.edges[part]), min(last, int(self.edges[part + 1]))
            here = slice(first - begin, end - begin)
            dense, ids, labels = self.maps[part]
            yield dense[here], ids[here], labels[here]
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


def _maps(conversion: Conversion, index: int, rows: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    def mapped(name: str, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
        return np.memmap(conversion.folder / column_name(index, name), dtype=kind, mode="r", shape=shape)

    return (
        mapped("dense", "<f4", (rows, DENSE)),
        mapped("ids", "<i4", (rows, SPARSE)),
        mapped("labels", "u1", (rows,)),
    )
