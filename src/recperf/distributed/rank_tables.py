"""What the tables of the click models (bags.py) and of DLRMv4 (tables.py) have in common on several ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.table_rules import RULES, RuleName
from .config import DistributedConfig
from .copies import CopiedTables
from .demand import Demand
from .library import require_torchrec
from .placement import placed_by
from .sharding import ShardedTables, TableShard, require_possible
from .world import World

CHUNK = 1 << 22
"""Initial values copied at a time."""


class RankTables(nn.Module):
    """Tables of one width on several ranks: shards, and copies of the data-parallel ones."""

    def __init__(
        self,
        demand: Demand,
        options: DistributedConfig,
        world: World,
        *,
        optimizer: RuleName,
        eps: float,
        device: torch.device | str,
        field: str,
    ) -> None:
        """`field` is the config field with the width of the tables."""
        super().__init__()
        placed = placed_by(options, demand, world.size)
        require_possible(options, placed, world, optimizer=optimizer, field=field)
        require_torchrec()
        self.rows = {table.name: table.rows for table in demand.tables}
        self.names, self.dim, self.rule = tuple(self.rows), demand.tables[0].dim, RULES[optimizer]
        self.world, self.device = world, torch.device(device)
        copied = {one.table.name: one.table.rows for one in placed if one.kind == "data-parallel"}
        self.copies = CopiedTables(copied, self.dim, world, self.device, rule=self.rule, eps=eps)
        self.sharded = ShardedTables(
            [one for one in placed if one.kind != "data-parallel"], demand, options, world,
            rule=self.rule, eps=eps, device=self.device, keyed=self._keyed,
        )  # fmt: skip
        self.parts = self.copies.parts() + self.sharded.parts
        self._rate = 0.0
        self.updates = 0
        """The number of updates so far."""

    @abstractmethod
    def _keyed(self, batch: Any) -> Any:
        """A batch as TorchRec's KeyedJaggedTensor."""

    def local(self) -> list[tuple[TableShard, Tensor, list[Tensor]]]:
        """This rank's shards and copies: their place, their rows, and the optimizer's states of those."""
        return self.sharded.local() + self.copies.local()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next update, before its rows are looked up."""
        self._rate = float(rate)
        self.sharded.set_rate(self._rate, self.updates)

    @torch.no_grad()
    def fill(self, table_rows: Callable[[str], Callable[[Tensor, int], None]]) -> None:
        """Write the initial values of a single process; `table_rows` returns what fills rows of a table from one on."""
        count = max(1, CHUNK // self.dim)
        for part, weight_RD, states in self.local():
            fill_rows = table_rows(part.table)
            for start in range(0, part.rows, count):
                # A row is drawn whole, and a shard of some columns keeps those.
                whole = torch.empty(min(count, part.rows - start), self.dim, device=weight_RD.device)
                fill_rows(whole, part.first_row + start)
                columns = slice(part.first_column, part.first_column + part.columns)
                weight_RD[start : start + whole.shape[0]] = whole[:, columns]
            for state in states:
                state.zero_()
