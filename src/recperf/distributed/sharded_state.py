"""Sharded tables as a checkpoint saves them.

Row-wise Adagrad has one number for each row: the sum over steps of the mean squared gradient over the row's columns.
Where a table is sharded by columns, each shard has the number of its own columns. The number of the whole row is then
their mean, weighted by columns, which a single process would have got from the same gradients. In the other direction
each shard begins with the number of the whole row. Element-wise Adagrad has a state as large as the table, which is
sharded like it; SGD has none.

Shapes: R rows of a table, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ..train.checkpoint_shards import Rectangle, Shard, Sharded
from .placing import Part
from .world import World


class Copies(Protocol):
    """Tables of which every rank has all rows."""

    @property
    def tables(self) -> Mapping[str, Tensor]: ...

    @property
    def states(self) -> Mapping[str, Tensor]:
        """Their optimizer states, if the optimizer has any."""
        ...


class ShardedTables(Protocol):
    """Tables of one width on several ranks."""

    world: World
    names: tuple[str, ...]
    rows: Mapping[str, int]
    dim: int
    parts: list[Part]
    remembered: int
    """Numbers in the optimizer's state for each row: 0, 1, or as many as the row has."""

    @property
    def copies(self) -> Copies: ...

    def local(self) -> list[tuple[Part, Tensor, Tensor | None]]:
        """This rank's shards: their place, their rows, and the optimizer's state of those."""
        ...


def sharded_state(tables: ShardedTables) -> dict[str, Sharded]:
    """Tables and their optimizer states as this rank has them, under the names a single process saves them by."""
    state, local = {}, tables.local()
    for number, name in enumerate(tables.names):
        if name in tables.copies.tables:
            whole = Rectangle(0, tables.rows[name], 0, tables.dim)
            # Any rank could write a copy: they take turns.
            ours = number % tables.world.size == tables.world.rank
            weights = [Shard(whole, tables.copies.tables[name].detach(), ours)]
            states = [Shard(whole, tables.copies.states[name].detach(), ours)] if tables.remembered else []
        else:
            here = [(_rectangle(part), weight, rows) for part, weight, rows in local if part.table == name]
            weights = [Shard(place, weight.detach()) for place, weight, _ in here]
            states = [Shard(place, rows.detach()) for place, _, rows in here if rows is not None]
        shape = (tables.rows[name], tables.dim)
        state[name] = Sharded(shape=shape, width=tables.dim, shards=weights)
        if tables.remembered:
            state_shape = shape if tables.remembered > 1 else shape[:1]
            state[f"{name}_state"] = Sharded(shape=state_shape, width=tables.dim, shards=states)
    return state


def _rectangle(part: Part) -> Rectangle:
    return Rectangle(part.first_row, part.rows, part.first_column, part.columns)
