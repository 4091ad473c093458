"""Tables of which every rank has a copy: small ones, for which sending rows costs more than keeping them.

TorchRec has these too, but its operator for a CPU adds the rows of a lookup up, and its gradient is as large as the
table. Here ranks send each other the rows they used and their gradient.

Shapes: R rows of a table, D width, U distinct rows that a rank's batch uses.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from ..models.dlrm_v4_tables import fill_uniform_, table_seed
from ..ops import lookup as ops
from .world import World


class Replicated:
    def __init__(self, rows: dict[str, int], dim: int, world: World, device: torch.device) -> None:
        self.world = world
        self.tables = {name: torch.empty(count, dim, device=device) for name, count in rows.items()}
        self.states = {name: torch.zeros(count, device=device) for name, count in rows.items()}

    def reset(self, seed: int) -> None:
        for name, table_RD in self.tables.items():
            fill_uniform_(table_RD, table_RD.shape[0] ** -0.5, table_seed(seed, name))
            self.states[name].zero_()

    def lookup(self, name: str, rows_U: Tensor) -> Tensor:
        return ops.gather(self.tables[name], rows_U)

    @torch.no_grad()
    def update(self, name: str, rows_U: Tensor, gradient_UD: Tensor, rate: float | Tensor, eps: float) -> None:
        """Every rank adds up what all ranks have, in the order of the ranks, so that copies stay equal to the bit."""
        rows_N, gradient_ND = of_all(rows_U.long(), self.world), of_all(gradient_UD, self.world)
        found = ops.unique(rows_N)
        summed_UD = ops.segment_sum(gradient_ND, found.order_N, found.starts_U1)
        ops.rowwise_adagrad_(
            self.tables[name], self.states[name], found.values_U, summed_UD.to(gradient_UD.dtype), rate=rate, eps=eps
        )


def of_all(ours: Tensor, world: World) -> Tensor:
    """Every rank's rows one behind the other; shorter ones travel with room to spare."""
    counts = torch.zeros(world.size, dtype=torch.long)
    counts[world.rank] = ours.shape[0]
    sizes: list[int] = world.sum_(counts).tolist()
    padded = ours.new_zeros(max(sizes), *ours.shape[1:])
    padded[: ours.shape[0]] = ours
    theirs = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(theirs, padded)
    return torch.cat([tensor[:size] for tensor, size in zip(theirs, sizes)])
