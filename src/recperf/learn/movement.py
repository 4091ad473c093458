"""How far weights move in a training, by part. A large tensor is compared in a sample of its rows, which is drawn
without torch's own generators.

Shapes: R sampled rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .records import PartSeen

ROWS, COLUMNS = 2048, 64
"""Rows and columns of a tensor that are compared, at most."""
PARALLEL = 1e-4
"""A row that changed by less than this share of itself, other than in proportion, did not learn: rounding of a weight
decay changes it so far."""
TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Sampled:
    name: str
    kind: str
    tensor: Tensor
    rows_R: Tensor
    start_RC: Tensor

    @property
    def now_RC(self) -> Tensor:
        return _sample(self.tensor, self.rows_R)


def sampled(model: Any, tables: Sequence[tuple[str, int]], state: Mapping[str, Any]) -> list[Sampled]:
    """The trainable tensors of a model, or of an object around one, at this moment. Of its state, which may have
    averages in their place, only tables that are no parameters are read. Tables that are stacked in one tensor are
    parts of their own; those whose rows lie outside the device are left out."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    trained = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    rows = sum(count for _, count in tables)
    parts = []
    for name, tensor in {**state, **trained}.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel():
            continue
        stacked = tensor.dim() == 2 and len(tensor) == rows and bool(tables)
        if (name in trained and not trained[name].requires_grad) or (name not in trained and not stacked):
            continue
        if stacked and len(tables) > 1:
            parts += list(_tables(name, tensor, tables))
        else:
            kind = "table" if stacked else "weight" if tensor.dim() > 1 else "vector"
            parts.append(_part(name, kind, tensor, 0, len(tensor) if tensor.dim() else 1))
    return parts


def _tables(name: str, tensor: Tensor, tables: Sequence[tuple[str, int]]) -> Iterator[Sampled]:
    first = 0
    for table, rows in tables:
        yield _part(f"{name.rpartition('.')[0] or name}.{table}", "table", tensor, first, rows)
        first += rows


def _part(name: str, kind: str, tensor: Tensor, first: int, rows: int) -> Sampled:
    draw = torch.Generator().manual_seed(rows)
    places = torch.arange(rows) if rows <= ROWS else torch.randperm(rows, generator=draw)[:ROWS].sort().values
    rows_R = (first + places).to(tensor.device)
    return Sampled(name, kind, tensor, rows_R, _sample(tensor, rows_R).clone())


def _sample(tensor: Tensor, rows_R: Tensor) -> Tensor:
    tensor = tensor.detach()
    rows = tensor.reshape(1, 1) if not tensor.dim() else tensor.reshape(len(tensor), -1)
    return rows[rows_R][:, :COLUMNS].double()


def moved(parts: Sequence[Sampled]) -> list[PartSeen]:
    """What became of the tensors that were sampled at the start."""
    seen = []
    for part in parts:
        start_RC, change_RC = part.start_RC, part.now_RC - part.start_RC
        if start_RC.shape[1] == 1:
            # The numbers of a vector are one row: a decay shrinks all alike.
            start_RC, change_RC = start_RC.t(), change_RC.t()
        size_R = start_RC.square().sum(1)
        along_R = (change_RC * start_RC).sum(1) / size_R.clamp(min=TINY)
        other_R = (change_RC - along_R[:, None] * start_RC).norm(dim=1)
        moved_R = other_R > PARALLEL * size_R.sqrt().clamp(min=TINY)
        whole = float(start_RC.norm())
        distance = float(change_RC.norm()) / whole if whole else 0.0
        share = float(moved_R.double().mean())
        seen.append(PartSeen(name=part.name, kind=part.kind, rows=len(size_R), moved=share, distance=distance))
    return seen
