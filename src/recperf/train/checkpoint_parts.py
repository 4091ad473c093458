"""Tensors of which no process holds all: who writes which part, and what of the stored parts fills one's own.

A part is a rectangle of rows and columns. What row-wise Adagrad keeps is one number a row and part: of parts by columns
each has its own. A part that is read where the stored ones have other columns gets the mean of theirs, weighted by the
columns it shares with each: of all columns that is what one process would have added up, and parts of a whole row begin
with the row's number.

Shapes: R rows, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

    def shared(self, other: Rectangle) -> Rectangle:
        """What is in both; it may be empty."""
        row, column = max(self.first_row, other.first_row), max(self.first_column, other.first_column)
        rows = min(self.first_row + self.rows, other.first_row + other.rows) - row
        columns = min(self.first_column + self.columns, other.first_column + other.columns) - column
        return Rectangle(row, max(0, rows), column, max(0, columns))


@dataclass(frozen=True, kw_only=True, eq=False)
class Divided:
    """A tensor that several processes hold together."""

    shape: tuple[int, ...]
    """Of the whole: R and D, or R where one number a row is kept."""
    width: int
    """D."""
    dtype: torch.dtype = torch.float32
    parts: Sequence[Rectangle]
    """As they are written, the same on all processes; together they cover the whole, and none of it twice."""
    ours: dict[int, Tensor]
    """Those that this process writes, by their number."""
    held: Sequence[tuple[Rectangle, Tensor]]
    """What this process has, and fills where a state is read."""

    @property
    def nbytes(self) -> int:
        """Of what is here."""
        return sum(tensor.nbytes for _, tensor in self.held)


def stacked(tensors: Sequence[Divided]) -> Divided:
    """Tensors of one width, one below the other, as one."""
    parts: list[Rectangle] = []
    ours: dict[int, Tensor] = {}
    held: list[tuple[Rectangle, Tensor]] = []
    rows = 0
    for tensor in tensors:
        ours.update({len(parts) + number: part for number, part in tensor.ours.items()})
        parts += [part.below(rows) for part in tensor.parts]
        held += [(part.below(rows), inner) for part, inner in tensor.held]
        rows += tensor.shape[0]
    first = tensors[0]
    return Divided(
        shape=(rows, *first.shape[1:]), width=first.width, dtype=first.dtype, parts=parts, ours=ours, held=held
    )


class Stored(NamedTuple):
    """A part of a tensor under a name of its own; one number a row, or a number for each column."""

    name: str
    place: Rectangle


class Wanted(NamedTuple):
    """A piece of something stored, and where it is to go."""

    name: str
    stored: tuple[int, ...]
    """The shape of what has that name."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    into: Tensor


@dataclass
class Means:
    """Numbers of rows that are means of several stored ones: what is read for them, and what is made of it."""

    rows: list[tuple[Tensor, list[tuple[int, float, Tensor]]]] = field(default_factory=list)

    def finish(self) -> None:
        for into_R, found in self.rows:
            # In float64, so that the mean of equal numbers is that number to the bit.
            sums_R = torch.zeros(into_R.shape, dtype=torch.float64)
            for start, weight, part in found:
                sums_R[start : start + part.shape[0]] += part.double() * weight
            into_R.copy_(sums_R)


def wanted_of(
    shape: tuple[int, ...], stored: Iterable[Stored], held: Iterable[tuple[Rectangle, Tensor]], means: Means
) -> Iterator[Wanted]:
    """What has to be read of a tensor for the parts that are held here."""
    sources = list(stored)
    for place, into in held:
        found = [(source, common) for source in sources if (common := source.place.shared(place)).area]
        if sum(common.area for _, common in found) != place.area:
            raise ValueError(f"rows {place.first_row} to {place.first_row + place.rows} are not all there")
        if len(shape) == 2:
            yield from (_rectangle(source, common, place, into) for source, common in found)
        elif all(common.columns == place.columns for _, common in found):
            yield from (_rows(source, common, into[_within(common, place)]) for source, common in found)
        else:
            rows: list[tuple[int, float, Tensor]] = []
            for source, common in found:
                part = torch.empty(common.rows, dtype=into.dtype)
                rows.append((common.first_row - place.first_row, common.columns / place.columns, part))
                yield _rows(source, common, part)
            means.rows.append((into, rows))


def _within(common: Rectangle, place: Rectangle) -> slice:
    start = common.first_row - place.first_row
    return slice(start, start + common.rows)


def _rectangle(source: Stored, common: Rectangle, place: Rectangle, into: Tensor) -> Wanted:
    offsets = common.first_row - source.place.first_row, common.first_column - source.place.first_column
    start = common.first_column - place.first_column
    view = into[_within(common, place), start : start + common.columns]
    stored = source.place.rows, source.place.columns
    return Wanted(source.name, stored, offsets, (common.rows, common.columns), view)


def _rows(source: Stored, common: Rectangle, into: Tensor) -> Wanted:
    start = common.first_row - source.place.first_row
    return Wanted(source.name, (source.place.rows,), (start,), (common.rows,), into)


def read_parts(about: dict[str, Any]) -> list[Rectangle]:
    return [Rectangle(*(int(number) for number in part)) for part in about["parts"]]
