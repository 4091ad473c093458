"""Tensors that ranks hold in rectangles of rows and columns, and what of the stored rectangles fills one of them.

Row-wise Adagrad has one number for each row of a rectangle. A rectangle that is read where the stored ones have other
columns gets the mean of their numbers, weighted by the columns they share: over all columns that is the number a
single process would have, and rectangles of a whole row begin with the row's number.

Shapes: R rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Rectangle(NamedTuple):
    first_row: int
    rows: int
    first_column: int
    columns: int

    @property
    def area(self) -> int:
        return self.rows * self.columns

    def below(self, rows: int) -> Rectangle:
        return self._replace(first_row=self.first_row + rows)

    def overlap(self, other: Rectangle) -> Rectangle:
        """The rectangle that is in both; it may be empty."""
        row, column = max(self.first_row, other.first_row), max(self.first_column, other.first_column)
        rows = min(self.first_row + self.rows, other.first_row + other.rows) - row
        columns = min(self.first_column + self.columns, other.first_column + other.columns) - column
        return Rectangle(row, max(0, rows), column, max(0, columns))


class Shard(NamedTuple):
    """A rectangle of a tensor in this process."""

    place: Rectangle
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


def stacked(tensors: Sequence[Sharded]) -> Sharded:
    """Tensors of one width, one below the other, as one."""
    shards: list[Shard] = []
    rows = 0
    for tensor in tensors:
        shards += [shard._replace(place=shard.place.below(rows)) for shard in tensor.shards]
        rows += tensor.shape[0]
    first = tensors[0]
    return Sharded(shape=(rows, *first.shape[1:]), width=first.width, dtype=first.dtype, shards=shards)


class StoredShard(NamedTuple):
    """A rectangle of a tensor in a file."""

    place: Rectangle
    file: str
    key: str


Read = Callable[[StoredShard, Tensor, int, int], None]
"""Fills a tensor from a stored rectangle, beginning at a row and a column of it."""


def fill(place: Rectangle, into: Tensor, stored: Iterable[StoredShard], read: Read) -> None:
    """Fill one rectangle from those that are stored."""
    sources = [(shard, common) for shard in stored if (common := shard.place.overlap(place)).area]
    if sum(common.area for _, common in sources) != place.area:
        raise ValueError(f"rows {place.first_row} to {place.first_row + place.rows} are incomplete or stored twice")
    if into.dim() == 1 and any(common.columns != place.columns for _, common in sources):
        into.copy_(_means(place, into.dtype, sources, read))
        return
    for shard, common in sources:
        row, column = common.first_row - place.first_row, common.first_column - place.first_column
        part = into[row : row + common.rows]
        if into.dim() == 2:
            part = part[:, column : column + common.columns]
        read(shard, part, common.first_row - shard.place.first_row, common.first_column - shard.place.first_column)


def _means(
    place: Rectangle, dtype: torch.dtype, sources: Iterable[tuple[StoredShard, Rectangle]], read: Read
) -> Tensor:
    # In float64, so that the mean of equal numbers is that number to the bit.
    means_R = torch.zeros(place.rows, dtype=torch.float64)
    for shard, common in sources:
        part = torch.empty(common.rows, dtype=dtype)
        read(shard, part, common.first_row - shard.place.first_row, 0)
        start = common.first_row - place.first_row
        means_R[start : start + common.rows] += part.double() * (common.columns / place.columns)
    return means_R
