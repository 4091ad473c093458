"""Data-parallel tables: every rank has a copy, since they are so small that sending their rows costs more.

The gradient of all copies is one dense tensor that is summed over the ranks in one message, as in TorchRec. Its own
data-parallel kernel (1.8.0) is not used: in an EmbeddingCollection it fails on a CPU, where it pools the rows of a
lookup; fbgemm's fused optimizers do not apply to it, so the update would be ours anyway; and DDP sums inside its C++
reducer, where waiting for a rank cannot be told from work.

Shapes: R rows of all copied tables one after the other, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..ops.table_rules import TableRule
from .sharding import TableShard
from .world import World


class CopiedTables:
    """Copies of some tables, and their update by a rule."""

    def __init__(
        self, rows: Mapping[str, int], dim: int, world: World, device: torch.device, *, rule: TableRule, eps: float
    ) -> None:
        self.names, self.rows, self.dim, self.world, self.eps = tuple(rows), rows, dim, world, eps
        self.rule, total = rule, sum(rows.values())
        self.table_RD = torch.zeros(total, dim, device=device)
        shape = rule.state_shape(total, dim)
        self.state = None if shape is None else torch.zeros(shape, device=device)
        ends = torch.tensor([0, *rows.values()]).cumsum(0).tolist()
        self.starts = dict(zip(rows, ends))

    def place(self, name: str) -> slice:
        """The rows of a table."""
        return slice(self.starts[name], self.starts[name] + self.rows[name])

    def parts(self, why: str = "--distributed.sharding") -> list[TableShard]:
        """One copy per table and rank."""
        return [
            part
            for name, rows in self.rows.items()
            for part in copy_parts(name, rows, self.dim, self.world, why, state_width=self.rule.state_width(self.dim))
        ]

    def local(self) -> list[tuple[TableShard, Tensor, list[Tensor]]]:
        """This rank's copies, and the optimizer's states of them."""
        own = [part for part in self.parts() if part.rank == self.world.rank]
        places = [self.place(part.table) for part in own]
        states = [[] if self.state is None else [*_by_kind(self.state[place], self.dim)] for place in places]
        return [(part, self.table_RD[place], state) for part, place, state in zip(own, places, states)]

    @torch.no_grad()
    def update(self, gradient_RD: Tensor, rate: float, rows_V: Tensor, count: int) -> None:
        """Sum the gradient over the ranks and update the rows that any rank used (`rows_V` are this rank's): the copies
        of all ranks stay equal to the bit. `count` is the number of updates including this one."""
        gradient_RD = self.world.sum_(gradient_RD)
        rows_U = torch.arange(len(gradient_RD), device=gradient_RD.device)
        if self.rule.counts:
            # With the other rules rows that nobody used have a gradient of zero, which changes nothing.
            used_R = self.world.sum_(gradient_RD.new_zeros(len(gradient_RD)).index_fill_(0, rows_V, 1.0))
            rows_U = used_R.nonzero().flatten()
            gradient_RD = gradient_RD.index_select(0, rows_U)
        self.rule.apply_(self.table_RD, self.state, rows_U, gradient_RD, rate=rate, eps=self.eps, count=count)


def _by_kind(state: Tensor, dim: int) -> Sequence[Tensor]:
    """The states of one kind after the other, as FBGEMM has them: each with a number for every row or weight."""
    return [state] if state.dim() == 1 else torch.split(state, dim, 1)


def copy_parts(name: str, rows: int, dim: int, world: World, why: str, *, state_width: int) -> list[TableShard]:
    """The copies of a data-parallel table, one per rank."""
    return [
        TableShard(
            table=name, rank=rank, kind="data-parallel", kernel="copy", first_row=0, rows=rows, first_column=0,
            columns=dim, why=why, state_width=state_width,
        )
        for rank in range(world.size)
    ]  # fmt: skip
