"""Tables that ranks hold parts of, as a checkpoint sees them.

Row-wise Adagrad keeps one number a row: the mean of squared gradients over the row's columns, added up. Divided by
columns, each part keeps that of its own columns. The number of the whole row is then their mean, weighted by columns,
which is what one process would have added up from the same gradients. The other way each part begins with the number of
the whole row. Adagrad of every number keeps what is as large as the table and moves like it; SGD keeps nothing.

Shapes: R rows of a table, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ..train.checkpoint_parts import Divided, Rectangle
from .placing import Part
from .world import World


class Copies(Protocol):
    """Tables of which every rank has all rows."""

    @property
    def tables(self) -> Mapping[str, Tensor]: ...

    @property
    def states(self) -> Mapping[str, Tensor]:
        """What the optimizer remembers of them, where it does."""
        ...


class Movable(Protocol):
    """Tables of one width on several ranks."""

    world: World
    names: tuple[str, ...]
    rows: Mapping[str, int]
    dim: int
    parts: list[Part]
    remembered: int
    """Numbers that the optimizer keeps of a row: none, one, or as many as the row has."""

    @property
    def copies(self) -> Copies: ...

    def local(self) -> list[tuple[Part, Tensor, Tensor | None]]:
        """This rank's parts of divided tables, their rows, and what the optimizer remembers of them."""
        ...


def divided(tables: Movable) -> dict[str, Divided]:
    """Tables and what is remembered of them, under the names one process saves them by, as this rank has them."""
    world, found, local = tables.world, {}, tables.local()
    for number, name in enumerate(tables.names):
        rows, turn = tables.rows[name], number % world.size == world.rank
        if name in tables.copies.tables:
            # Any rank could write it: they take turns.
            parts = [Rectangle(0, rows, 0, tables.dim)]
            weights = [(parts[0], tables.copies.tables[name])]
            states = [(parts[0], tables.copies.states[name])] if tables.remembered else []
        else:
            turn, parts = True, [_rectangle(part) for part in _parts(tables, name)]
            weights = [(_rectangle(part), weight) for part, weight, _ in local if part.table == name]
            states = [(_rectangle(part), state) for part, _, state in local if part.table == name and state is not None]
        shape, each = (rows, tables.dim), tables.remembered > 1
        found[name] = _divided(shape, tables.dim, parts, weights, turn)
        if tables.remembered:
            found[f"{name}_state"] = _divided(shape if each else shape[:1], tables.dim, parts, states, turn)
    return found


def _divided(
    shape: tuple[int, ...], width: int, parts: list[Rectangle], held: list[tuple[Rectangle, Tensor]], writes: bool
) -> Divided:
    kept = [(place, tensor.detach()) for place, tensor in held]
    ours = {parts.index(place): tensor for place, tensor in kept} if writes else {}
    return Divided(shape=shape, width=width, parts=parts, ours=ours, held=kept)


def _rectangle(part: Part) -> Rectangle:
    return Rectangle(part.first_row, part.rows, part.first_column, part.columns)


def _parts(tables: Movable, name: str) -> list[Part]:
    return [part for part in tables.parts if part.table == name]
