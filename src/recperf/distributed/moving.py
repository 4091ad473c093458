"""Tables between the ranks that hold their parts and rank 0, which saves and loads them whole, one table at a time.

Row-wise Adagrad keeps one number a row: the mean of squared gradients over the row's columns, added up. Divided by
columns, each part keeps that of its own columns. The number of the whole row is then their mean, weighted by columns,
which is what one process would have added up from the same gradients. The other way each part begins with the number of
the whole row.

Shapes: R rows of a table, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from .placing import Part
from .world import World

if TYPE_CHECKING:
    from .tables import TorchRecTables


@torch.no_grad()
def collect(tables: TorchRecTables) -> dict[str, Tensor]:
    """All tables on rank 0, on its host."""
    world, found = tables.world, {}
    held = {_key(part): (weight, state) for part, weight, state in tables.local()}
    for name in tables.names:
        if name in tables.copies.tables:
            if world.leads:
                found[name] = tables.copies.tables[name].detach().cpu().clone()
                found[f"{name}_state"] = tables.copies.states[name].cpu().clone()
            continue
        rows = tables.rows[name]
        if world.leads:
            found[name] = torch.empty(rows, tables.dim)
            sums_R = torch.zeros(rows, dtype=torch.float64)
        for part in _parts(tables, name):
            weight, state = held.get(_key(part), (None, None))
            weight = _to_first(world, part, weight, (part.rows, part.columns))
            state = _to_first(world, part, state, (part.rows,))
            if weight is None or state is None:
                continue
            these = slice(part.first_row, part.first_row + part.rows)
            found[name][these, part.first_column : part.first_column + part.columns] = weight
            # In float64, so that the mean of equal numbers is that number to the bit.
            sums_R[these] += state.double() * (part.columns / tables.dim)
        if world.leads:
            found[f"{name}_state"] = sums_R.float()
    return found


@torch.no_grad()
def spread(tables: TorchRecTables, saved: Mapping[str, Tensor]) -> None:
    """To every rank its parts of what rank 0 has."""
    world = tables.world
    held = {_key(part): (weight, state) for part, weight, state in tables.local()}
    for name in tables.names:
        if name in tables.copies.tables:
            for kept, key in ((tables.copies.tables, name), (tables.copies.states, f"{name}_state")):
                if world.leads:
                    kept[name].copy_(saved[key])
                distributed.broadcast(kept[name], src=0)
            continue
        for part in _parts(tables, name):
            weight, state = held.get(_key(part), (None, None))
            these = slice(part.first_row, part.first_row + part.rows)
            columns = slice(part.first_column, part.first_column + part.columns)
            ours = saved[name][these, columns] if world.leads else None
            _from_first(world, part, ours, weight)
            _from_first(world, part, saved[f"{name}_state"][these] if world.leads else None, state)


def _parts(tables: TorchRecTables, name: str) -> list[Part]:
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
