"""Embedding bags in plain torch, on any device: the definition that the other implementations must match.

Shapes: V ids, B bags, R table rows, D width, U distinct rows among the ids.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..arguments import unknown_id
from ..hashing import rows_torch
from ..table_rules import RULES, RuleName

CHUNK = 16_384
"""Ids whose gradients are expanded at a time, which bounds the memory whatever the batch."""


def hash_rows(ids_V: Tensor, seed: int, rows: int) -> Tensor:
    return rows_torch(ids_V, seed, rows)


def stacked_rows(ids_V: Tensor, offsets_B1: Tensor, starts_F: Tensor | None) -> Tensor:
    """The row of the stacked tables that each id means; the bags of a feature follow one another."""
    if starts_F is None:
        return ids_V
    bags_a_feature = (offsets_B1.numel() - 1) // starts_F.numel()
    edges_F1 = offsets_B1[:: max(1, bags_a_feature)]
    if not bags_a_feature:
        return ids_V
    return ids_V + starts_F.repeat_interleave(edges_F1.diff(), output_size=ids_V.numel())


def checked_rows(
    ids_V: Tensor, offsets_B1: Tensor, rows: int, starts_F: Tensor | None, *, wait: bool = False
) -> Tensor:
    """`stacked_rows`; an id outside its table is an error: on a CPU, and on a GPU where the check may wait for it."""
    rows_V = stacked_rows(ids_V, offsets_B1, starts_F)
    if wait or ids_V.device.type == "cpu":
        starts_F = ids_V.new_zeros(1) if starts_F is None else starts_F
        sizes_F = torch.cat([starts_F[1:], starts_F.new_tensor([rows])]) - starts_F
        sizes_V = stacked_rows(torch.zeros_like(ids_V), offsets_B1, sizes_F)
        places = ((ids_V < 0) | (ids_V >= sizes_V)).nonzero()
        if places.numel():
            place = int(places[0])
            raise unknown_id("ids_V", place, int(ids_V[place]), int(sizes_V[place]))
    return rows_V


def bag_sum(table_RD: Tensor, ids_V: Tensor, offsets_B1: Tensor, starts_F: Tensor | None = None) -> Tensor:
    rows_V = checked_rows(ids_V, offsets_B1, table_RD.shape[0], starts_F)
    return F.embedding_bag(rows_V, table_RD, offsets_B1, mode="sum", include_last_offset=True)


class Grouped:
    """The ids of a batch in order of their rows, equal rows together, and the bag each id belongs to."""

    def __init__(self, ids_V: Tensor, offsets_B1: Tensor, rows: int, starts_F: Tensor | None = None) -> None:
        rows_V = checked_rows(ids_V, offsets_B1, rows, starts_F)
        self.sorted_V, order_V = torch.sort(rows_V, stable=True)
        bags = torch.arange(offsets_B1.numel() - 1, device=rows_V.device)
        bag_V = bags.repeat_interleave(offsets_B1.diff(), output_size=rows_V.numel())
        self.bags_V = bag_V[order_V]
        self.rows_U, self.group_V = torch.unique_consecutive(self.sorted_V, return_inverse=True)

    def moved(self, slots_U: Tensor, count: int) -> Grouped:
        """The same groups, of rows that lie elsewhere."""
        self.rows_U = slots_U.index_select(0, self.rows_U)
        return self

    @property
    def unique(self) -> int:
        return int(self.rows_U.numel())


def _summed(grouped: Grouped, gradient_BD: Tensor) -> Tensor:
    """The summed gradient of each distinct row."""
    summed_UD = gradient_BD.new_zeros(grouped.unique, gradient_BD.shape[1])
    for part in range(0, grouped.bags_V.numel(), CHUNK):
        ids = slice(part, part + CHUNK)
        summed_UD.index_add_(0, grouped.group_V[ids], gradient_BD.index_select(0, grouped.bags_V[ids]))
    return summed_UD


def update(
    table_RD: Tensor,
    state: Tensor | None,
    grouped: Grouped,
    gradient_BD: Tensor,
    *,
    rule: RuleName,
    rate: float | Tensor,
    eps: float,
    decay: float,
    scale: float,
    count: float | Tensor = 1,
) -> None:
    """Update the used rows and their state in place by a rule; `count` is the number of updates including this one."""
    summed_UD = _summed(grouped, gradient_BD) * scale
    RULES[rule].apply_(table_RD, state, grouped.rows_U, summed_UD, rate=rate, eps=eps, decay=decay, count=count)


def squared_norm(grouped: Grouped, gradient_BD: Tensor) -> float:
    """The squared norm of the summed gradient of the distinct rows."""
    return float(_summed(grouped, gradient_BD).square().sum())
