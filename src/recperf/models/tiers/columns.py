"""Leaves of a state that are no plain tensors: columns of tables in tiers, and tensors that ranks hold in rectangles of
rows and columns. A checkpoint reads them, and loads them again.

Shapes: R rows of the tensor, D its width, N rows among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from .cache import TieredRows

PIECE = 1 << 25
"""Bytes of records in memory at a time: a column of one number a row has records of hundreds."""


class RowBlock(NamedTuple):
    """Consecutive rows of a tensor that lie in tiers."""

    first_row: int
    """In the tensor."""
    rows: int
    stored: int
    """Number of the first of them among all rows in these tiers."""

    @property
    def end(self) -> int:
        return self.first_row + self.rows


@dataclass(frozen=True, eq=False)
class TableColumns:
    """The weights of a table, or the optimizer state of its rows; of several tables stacked in one tensor likewise.
    Other ranks may have other rows of the tensor."""

    tiers: TieredRows
    shape: tuple[int, ...]
    """Of the tensor; of one dimension where there is a number for each row."""
    blocks: Sequence[RowBlock]
    """What lies in these tiers, ascending."""
    columns: slice
    initial: dict[str, Any]
    """What `init.initial_rows` computes rows from that were never trained, as JSON values."""
    dtype: torch.dtype = torch.float32

    @property
    def in_files(self) -> bool:
        return self.tiers.store.kind == "file"

    def written(self) -> int:
        """How many rows `rows` has."""
        trained_R = self.tiers.trained()
        return sum(int(np.count_nonzero(trained_R[stored : stored + rows])) for _, rows, stored in self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of these rows and of their numbers."""
        return self.written() * (math.prod(self.shape[1:]) * self.dtype.itemsize + torch.int64.itemsize)

    def rows(self) -> Tensor:
        """The rows here that were ever trained or loaded, ascending; a row of a batch in flight counts as one."""
        trained_R = self.tiers.trained()
        numbers = [np.flatnonzero(trained_R[stored : stored + rows]) + first for first, rows, stored in self.blocks]
        return torch.from_numpy(np.concatenate(numbers or [np.empty(0, np.int64)]))

    def values(self, rows_N: Tensor) -> Tensor:
        """A copy of these rows, which are here, in host memory, contiguous."""
        columns = [
            self.tiers.records(piece)[:, self.columns].cpu().contiguous()
            for piece in torch.split(self._stored(rows_N)[0], self._records())
        ]
        return torch.cat(columns).view(-1, *self.shape[1:])

    def load(self, rows_N: Tensor, values: Tensor) -> None:
        """Write those of these rows that are here; the other columns of their records keep their values, or get their
        initial ones."""
        stored_N, here_N = self._stored(rows_N)
        if not len(stored_N):
            return
        for piece, part in zip(*(torch.split(one, self._records()) for one in (stored_N, values[here_N]))):
            self.tiers.load(piece.numpy(), self.columns, part)

    def _stored(self, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers, among the rows of these tiers, of those that are here, and which of them are."""
        if not self.blocks:
            return rows_N[:0], torch.zeros_like(rows_N, dtype=torch.bool)
        first_B, rows_B, stored_B = (torch.tensor(column) for column in zip(*self.blocks))
        block_N = torch.searchsorted(first_B, rows_N, right=True) - 1
        offset_N = rows_N - first_B[block_N]
        here_N = (block_N >= 0) & (offset_N < rows_B[block_N])
        return (stored_B[block_N] + offset_N)[here_N], here_N

    def _records(self) -> int:
        return max(1, PIECE // (4 * self.tiers.store.width))

    def clear(self) -> None:
        """Give all rows their initial values again, in all columns."""
        self.tiers.clear()


@dataclass(frozen=True, eq=False)
class TrainedRows:
    """The values of rows in tiers, read when they are written: a copy of all may not fit into memory."""

    columns: TableColumns
    rows_N: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.columns.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows_N), *self.columns.shape[1:]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> Tensor:
        return self.columns.values(self.rows_N[rows])


def whole_columns(tiers: TieredRows, columns: slice, initial: dict[str, Any], *, flat: bool = False) -> TableColumns:
    """Columns of all tables in tiers, stacked; `flat`: as a tensor of one dimension."""
    rows = sum(tiers.tables.values())
    shape = (rows,) if flat else (rows, columns.stop - columns.start)
    return TableColumns(tiers, shape, [RowBlock(0, rows, 0)], columns, initial)


def table_columns(value: Any) -> list[TableColumns]:
    """The columns of tables in tiers among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, TableColumns)]


def require_read(leaf: Any) -> None:
    """Refuse a tensor in place of columns into which a checkpoint was read."""
    if not isinstance(leaf, TableColumns):
        raise TypeError("the rows of this model lie in tiers, into which they were not read")


class Rectangle(NamedTuple):
    first_row: int
    rows: int
    first_column: int
    columns: int

    @property
    def area(self) -> int:
        return self.rows * self.columns

    def overlap(self, other: Rectangle) -> Rectangle:
        """The rectangle that is in both; it may be empty."""
        row, column = max(self.first_row, other.first_row), max(self.first_column, other.first_column)
        rows = min(self.first_row + self.rows, other.first_row + other.rows) - row
        columns = min(self.first_column + self.columns, other.first_column + other.columns) - column
        return Rectangle(row, max(0, rows), column, max(0, columns))


class Shard(NamedTuple):
    """A rectangle of a tensor in this process."""

    rectangle: Rectangle
    tensor: Tensor
    written: bool = True
    """Whether this process saves it; of copies on every rank only one does."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharded:
    """A tensor that several ranks hold together. What they write covers the whole, and none of it twice."""

    shape: tuple[int, ...]
    """Of the whole: R and D, or R where there is one number for each row."""
    width: int
    """D."""
    shards: Sequence[Shard]
    """The rectangles in this process; loading a state fills them."""
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes in this process."""
        return sum(shard.tensor.nbytes for shard in self.shards)


def stacked(tensors: Sequence[Sharded | TableColumns]) -> Sharded | TableColumns:
    """Tensors of one width, one below the other, as one; all of them are in tiers, or none."""
    shards: list[Shard] = []
    blocks: list[RowBlock] = []
    rows = 0
    for tensor in tensors:
        if isinstance(tensor, Sharded):
            moved = (shard.rectangle._replace(first_row=shard.rectangle.first_row + rows) for shard in tensor.shards)
            shards += [shard._replace(rectangle=rectangle) for shard, rectangle in zip(tensor.shards, moved)]
        else:
            blocks += [block._replace(first_row=block.first_row + rows) for block in tensor.blocks]
        rows += tensor.shape[0]
    first, shape = tensors[0], (rows, *tensors[0].shape[1:])
    if isinstance(first, Sharded):
        return replace(first, shape=shape, shards=shards)
    initial = first.initial
    if initial["kind"] != "zero":
        parts = [{"rows": one.shape[0], "initial": one.initial} for one in tensors if not isinstance(one, Sharded)]
        initial = {"kind": "stacked", "parts": parts}
    return replace(first, shape=shape, blocks=blocks, initial=initial)
