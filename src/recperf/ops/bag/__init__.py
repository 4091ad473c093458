"""Embedding bags and their sparse update: `reference` (plain torch, any device), `native` (C, on a CPU) and `triton`
(one GPU, all tables in one kernel launch).

implementation, why = choose("auto", table)
pooled = implementation.bag_sum(table, ids, offsets, starts)
grouped = implementation.Grouped(ids, offsets, table.shape[0], starts)
implementation.update(table, state, grouped, gradient, rule="rowwise-adagrad", rate=..., eps=..., decay=..., scale=...)

`table_rules` declares the rules and the shape of their state

`starts` says where the table of each feature begins when several are stacked in one; without it ids are rows.

`grouped.moved(slots, count)` is for a cache of rows: ids are places among the distinct rows of a batch, in ascending
order, and `slots` says where each lies in a tensor of `count` rows. Groups keep the order of the rows, which decides in
which order triton adds gradients and all of them add up a norm: so a cache gives the same bits as the whole table.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .. import choice
from ..choice import Name

__all__ = ["Name", "choose"]


def choose(name: Name, table: Tensor) -> tuple[ModuleType, str]:
    """The implementation and the reason for it; an explicit request that cannot be met is an error."""
    problem = None if table.dtype == torch.float32 else f"the table is {table.dtype}"
    return choice.choose(__name__, name, table.device, fix="--model.bag reference", problem=problem)
