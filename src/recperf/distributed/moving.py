"""Tables that ranks hold parts of: as a checkpoint sees them, and whole on rank 0, one table at a time.

Row-wise Adagrad keeps one number a row: the mean of squared gradients over the row's columns, added up. Divided by
columns, each part keeps that of its own columns. The number of the whole row is then their mean, weighted by columns,
which is what one process would have added up from the same gradients. The other way each part begins with the number of
the whole row. Adagrad of every number keeps what is as large as the table and moves like it; SGD keeps nothing.

Shapes: R rows of a table, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, distributed

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


@torch.no_grad()
def collect(tables: Movable) -> dict[str, Tensor]:
    """All tables on rank 0, on its host."""
    world, found = tables.world, {}
    held = {_key(part): (weight, state) for part, weight, state in tables.local()}
    for name in tables.names:
        if name in tables.copies.tables:
            if world.leads:
                found[name] = tables.copies.tables[name].detach().cpu().clone()
                if tables.remembered:
                    found[f"{name}_state"] = tables.copies.states[name].cpu().clone()
            continue
        rows, each = tables.rows[name], tables.remembered > 1
        if world.leads:
            found[name] = torch.empty(rows, tables.dim)
            sums = torch.zeros(rows, tables.remembered, dtype=torch.float32 if each else torch.float64)
        for part in _parts(tables, name):
            weight, state = held.get(_key(part), (None, None))
            weight = _to_first(world, part, weight, (part.rows, part.columns))
            if tables.remembered:
                state = _to_first(world, part, state, (part.rows, part.columns) if each else (part.rows,))
            if weight is None:
                continue
            these, columns = _place(part)
            found[name][these, columns] = weight
            if state is not None and each:
                sums[these, columns] = state
            elif state is not None:
                # In float64, so that the mean of equal numbers is that number to the bit.
                sums[these, 0] += state.double() * (part.columns / tables.dim)
        if world.leads and tables.remembered:
            found[f"{name}_state"] = sums if each else sums[:, 0].float()
    return found


@torch.no_grad()
def spread(tables: Movable, saved: Mapping[str, Tensor]) -> None:
    """To every rank its parts of what rank 0 has."""
    world = tables.world
    held = {_key(part): (weight, state) for part, weight, state in tables.local()}
    for name in tables.names:
        if name in tables.copies.tables:
            for kept, key in ((tables.copies.tables, name), (tables.copies.states, f"{name}_state")):
                if name in kept:
                    if world.leads:
                        kept[name].copy_(saved[key])
                    distributed.broadcast(kept[name], src=0)
            continue
        for part in _parts(tables, name):
            weight, state = held.get(_key(part), (None, None))
            these, columns = _place(part)
            _from_first(world, part, saved[name][these, columns] if world.leads else None, weight)
            if tables.remembered:
                whole = saved[f"{name}_state"][these] if world.leads else None
                if whole is not None and whole.dim() == 2:
                    whole = whole[:, columns]
                _from_first(world, part, whole, state)


def _place(part: Part) -> tuple[slice, slice]:
    return (
        slice(part.first_row, part.first_row + part.rows),
        slice(part.first_column, part.first_column + part.columns),
    )


def _parts(tables: Movable, name: str) -> list[Part]:
    return [part for part in tables.parts if part.table == name]


def _key(part: Part) -> tuple[str, int, int]:
    return part.table, part.first_row, part.first_column


def _to_first(world: World, part: Part, ours: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """A part on rank 0's host; none elsewhere."""
    if world.leads:
        if ours is not None:
            return ours.detach().cpu()
        found = torch.empty(shape)
        distributed.recv(found, src=part.rank)
        return found
    if ours is not None:
        distributed.send(ours.detach().cpu().contiguous(), dst=0)
    return None


def _from_first(world: World, part: Part, whole: Tensor | None, ours: Tensor | None) -> None:
    if whole is not None and ours is not None:
        ours.copy_(whole)
    elif whole is not None:
        distributed.send(whole.cpu().contiguous(), dst=part.rank)
    elif ours is not None:
        room = torch.empty(ours.shape)
        distributed.recv(room, src=0)
        ours.copy_(room)
