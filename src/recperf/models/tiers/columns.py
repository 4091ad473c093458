"""Columns of a table in tiers as a leaf of a state: what a checkpoint reads, and loads again.

Shapes: R rows of the table, N rows among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
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
    """What `init.initial_rows` computes rows from that were never trained, as JSON values."""
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
        rows, width = len(self._own(self.tiers.trained_R)), self.columns.stop - self.columns.start
        return (rows,) if self.flat else (rows, width)

    def written(self) -> int:
        """How many rows `rows` has."""
        return int(np.count_nonzero(self._own(self.tiers.trained())))

    @property
    def nbytes(self) -> int:
        """Bytes of these rows and of their numbers."""
        return self.written() * (math.prod(self.shape[1:]) * self.dtype.itemsize + torch.int64.itemsize)

    def rows(self) -> Tensor:
        """The rows that were ever trained or loaded, ascending; a row of a batch in flight counts as one."""
        return torch.from_numpy(np.flatnonzero(self._own(self.tiers.trained())))

    def values(self, rows_N: Tensor) -> Tensor:
        """A copy of these rows in host memory, contiguous."""
        columns = [
            self.tiers.records({self.table: piece.to(self.tiers.device)})[:, self.columns].cpu().contiguous()
            for piece in torch.split(rows_N, self._records())
        ]
        values = torch.cat(columns)
        return values.view(-1) if self.flat else values

    def load(self, rows_N: Tensor, values: Tensor) -> None:
        """Write these rows; the other columns of their records keep their values, or get their initial ones."""
        for piece, part in zip(torch.split(rows_N, self._records()), torch.split(values, self._records())):
            self.tiers.load((piece + self.tiers.starts[self.table]).numpy(), self.columns, part)

    def _records(self) -> int:
        return max(1, PIECE // (4 * self.tiers.store.width))

    def clear(self) -> None:
        """Give all rows their initial values again, in all columns."""
        self.tiers.clear()

    def _own(self, trained_R: NDArray[np.bool_]) -> NDArray[np.bool_]:
        start = self.tiers.starts[self.table]
        return trained_R[start : None if self.stacked else start + self.tiers.tables[self.table]]


def table_columns(value: Any) -> list[TableColumns]:
    """The columns of tables in tiers among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, TableColumns)]


def require_read(leaf: Any) -> None:
    """Refuse a tensor in place of columns into which a checkpoint was read."""
    if not isinstance(leaf, TableColumns):
        raise TypeError("the rows of this model lie in tiers, into which they were not read")
