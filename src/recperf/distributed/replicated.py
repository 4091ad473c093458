"""Tables of which every rank has a copy: small ones, for which sending rows costs more than keeping them.

TorchRec has these too, but its operator for a CPU adds the rows of a lookup up, and its gradient is as large as the
table. Here ranks send each other the rows they used, while the step is computed, and then the gradients of all tables
in one message.

Shapes: R rows of a table, D width, U distinct rows that a rank's batch uses, N those of all ranks one behind the other,
T tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from ..models.dlrm_v4.tables import fill_uniform_, table_seed
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

    def gather(self, rows: Mapping[str, Tensor]) -> Gathering | None:
        """Begin to tell the other ranks what this one uses."""
        return Gathering({name: rows[name] for name in self.tables}, self.world) if self.tables else None

    @torch.no_grad()
    def update(self, used: Gathering, gradients: Mapping[str, Tensor], rate: float | Tensor, eps: float) -> None:
        """Every rank adds up what all ranks have, in the order of the ranks, so that copies stay equal to the bit."""
        rows, theirs = used.rows(), used.of_all(gradients)
        for name, table_RD in self.tables.items():
            found = ops.unique(rows[name])
            summed_UD = ops.segment_sum(theirs[name], found.order_N, found.starts_U1).to(table_RD.dtype)
            ops.rowwise_adagrad_(table_RD, self.states[name], found.values_U, summed_UD, rate=rate, eps=eps)


class Gathering:
    """The rows that each rank uses of some tables, on their way to all: first how many, then which."""

    def __init__(self, rows: Mapping[str, Tensor], world: World) -> None:
        self._names = tuple(rows)
        self._ours = torch.cat([rows_U.long() for rows_U in rows.values()])
        ours_T = torch.tensor([rows_U.shape[0] for rows_U in rows.values()])
        self._counts = [torch.empty_like(ours_T) for _ in range(world.size)]
        self._told: Any = distributed.all_gather(self._counts, ours_T, async_op=True)
        self._sizes: list[list[int]] = []

    def send(self) -> None:
        """The rows, once every rank knows how many come."""
        self._told.wait()
        self._sizes = [counts_T.tolist() for counts_T in self._counts]
        self._theirs, self._sent = self._gathered(self._ours)

    def rows(self) -> dict[str, Tensor]:
        """Of all ranks, by table."""
        self._sent.wait()
        return self._by_table(self._theirs)

    def of_all(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Something that belongs to the rows, of all ranks; one message for all tables."""
        theirs, sent = self._gathered(torch.cat([parts[name] for name in self._names]))
        sent.wait()
        return self._by_table(theirs)

    def _gathered(self, ours: Tensor) -> tuple[list[Tensor], Any]:
        """Shorter ones travel with room to spare."""
        padded = ours.new_zeros(max(map(sum, self._sizes)), *ours.shape[1:])
        padded[: ours.shape[0]] = ours
        theirs = [torch.empty_like(padded) for _ in self._sizes]
        return theirs, distributed.all_gather(theirs, padded, async_op=True)

    def _by_table(self, theirs: list[Tensor]) -> dict[str, Tensor]:
        split = [torch.split(whole[: sum(sizes)], sizes) for whole, sizes in zip(theirs, self._sizes)]
        return {name: torch.cat([parts[place] for parts in split]) for place, name in enumerate(self._names)}
