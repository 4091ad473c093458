"""Data-parallel tables: every rank has a copy, since they are so small that sending their rows costs more.

The gradient of all copies is one dense tensor that is summed over the ranks in one message, as in TorchRec. Its own
data-parallel kernel (1.8.0) is not used: in an EmbeddingCollection it fails on a CPU, where it pools the rows of a
lookup; fbgemm's fused optimizers do not apply to it, so the update would be ours anyway; and DDP sums inside its C++
reducer, where waiting for a rank cannot be told from work.

Shapes: R rows of all copied tables one after the other, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .sharding import Part
from .world import World


class CopiedTables:
    """Copies of some tables, and their update by SGD, Adagrad or row-wise Adagrad."""

    def __init__(
        self, rows: Mapping[str, int], dim: int, world: World, device: torch.device, *, state_width: int, eps: float
    ) -> None:
        self.names, self.rows, self.dim, self.world, self.eps = tuple(rows), rows, dim, world, eps
        self.state_width = state_width
        total = sum(rows.values())
        self.table_RD = torch.zeros(total, dim, device=device)
        self.state = torch.zeros((total, dim) if state_width > 1 else total, device=device) if state_width else None
        ends = torch.tensor([0, *rows.values()]).cumsum(0).tolist()
        self.starts = dict(zip(rows, ends))

    def place(self, name: str) -> slice:
        """The rows of a table."""
        return slice(self.starts[name], self.starts[name] + self.rows[name])

    def parts(self, why: str = "--distributed.sharding") -> list[Part]:
        """One copy per table and rank."""
        return [
            part
            for name, rows in self.rows.items()
            for part in copy_parts(name, rows, self.dim, self.world, why, state_width=self.state_width)
        ]

    def local(self) -> list[tuple[Part, Tensor, Tensor | None]]:
        """This rank's copies, and the optimizer's state of them."""
        own = [part for part in self.parts() if part.rank == self.world.rank]
        places = [self.place(part.table) for part in own]
        states = [None if self.state is None else self.state[place] for place in places]
        return [(part, self.table_RD[place], state) for part, place, state in zip(own, places, states)]

    @torch.no_grad()
    def update(self, gradient_RD: Tensor, rate: float) -> None:
        """Sum the gradient over the ranks and update. Rows without a gradient stay as they are, and the copies of all
        ranks stay equal to the bit."""
        step_RD = self.world.sum_(gradient_RD)
        if self.state is not None:
            squares_RD = step_RD.square()
            self.state += squares_RD if self.state.dim() > 1 else squares_RD.mean(1)
            scale = self.state.sqrt() + self.eps
            step_RD = step_RD / (scale if self.state.dim() > 1 else scale.unsqueeze(1))
        self.table_RD -= rate * step_RD


def copy_parts(name: str, rows: int, dim: int, world: World, why: str, *, state_width: int) -> list[Part]:
    """The copies of a data-parallel table, one per rank."""
    return [
        Part(
            table=name, rank=rank, kind="data-parallel", kernel="copy", first_row=0, rows=rows, first_column=0,
            columns=dim, why=why, state_width=state_width,
        )
        for rank in range(world.size)
    ]  # fmt: skip
