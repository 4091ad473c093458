"""Columns of a table in tiers as a leaf of a state: what a checkpoint reads, and loads again.

Shapes: R rows of the table, N rows among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cache import TieredRows

PIECE = 1 << 25
"""Bytes of records in memory at a time: a column of one number a row has records of hundreds."""


@dataclass(frozen=True, eq=False)
class TableColumns:
    """The weights of a table, or the optimizer state of its rows; of several tables stacked in one tensor likewise."""

    tiers: TieredRows
    table: str
    columns: slice
    initial: dict[str, Any]
    """What rows that were never trained are computed from, as JSON values."""
    flat: bool = False
    """Whether the tensor has one dimension, a number for each row."""
    stacked: bool = False
    """Whether the tables after this one belong to the tensor too."""
    dtype: torch.dtype = torch.float32

    @property
    def in_files(self) -> bool:
        return self.tiers.store.kind == "file"

    @property
    def shape(self) -> tuple[int, ...]:
        rows, width = len(self._generations()), self.columns.stop - self.columns.start
        return (rows,) if self.flat else (rows, width)

    def written(self) -> int:
        return int(np.count_nonzero(self._generations()))

    def changed(self, since: int) -> tuple[Tensor, int]:
        """The rows that were trained or loaded after a generation, and the generation that ends now."""
        generation = self.tiers.end_generation()
        return torch.from_numpy((self._generations() > since).nonzero()[0]), generation

    def values(self, rows_N: Tensor) -> Tensor:
        columns = [
            self.tiers.records({self.table: piece.to(self.tiers.device)})[:, self.columns].cpu().contiguous()
            for piece in torch.split(rows_N, self._records())
        ]
        values = torch.cat(columns)
        return values.view(-1) if self.flat else values

    def load(self, rows_N: Tensor, values: Tensor) -> None:
        for piece, part in zip(torch.split(rows_N, self._records()), torch.split(values, self._records())):
            self.tiers.load((piece + self.tiers.starts[self.table]).numpy(), self.columns, part)

    def _records(self) -> int:
        return max(1, PIECE // (4 * self.tiers.store.width))

    def clear(self) -> None:
        self.tiers.clear()

    def _generations(self) -> Any:
        start = self.tiers.starts[self.table]
        return self.tiers.changed_R[start : None if self.stacked else start + self.tiers.tables[self.table]]


def require_read(leaf: Any) -> None:
    """Refuse a tensor in place of columns into which a checkpoint was read."""
    if not isinstance(leaf, TableColumns):
        raise TypeError("the rows of this model lie in tiers, into which they were not read")
