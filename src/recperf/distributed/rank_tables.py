"""What the tables of the click models (bags.py) and of DLRMv4 (tables.py) have in common on several ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .config import DistributedConfig
from .copies import CopiedTables
from .library import require_torchrec
from .sharding import Part, ShardedTables
from .world import World

FBGEMM = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise-adagrad": "EXACT_ROWWISE_ADAGRAD"}
"""The optimizers that fbgemm has on CPU and GPU, under its names. It has no AdamW that updates unused rows."""
CHUNK = 1 << 22
"""Initial values copied at a time."""


class RankTables(nn.Module):
    """Tables of one width on several ranks: shards, and copies of the data-parallel ones."""

    def __init__(
        self,
        tables: Mapping[str, int],
        dim: int,
        options: DistributedConfig,
        world: World,
        *,
        pooled: bool,
        optimizer: str,
        eps: float,
        ids: Mapping[str, float],
        batch_size: int,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        require_torchrec()
        self.world, self.rows, self.dim, self.device = world, tables, dim, torch.device(device)
        self.names = tuple(tables)
        self.state_width = {"sgd": 0, "adagrad": dim, "rowwise-adagrad": 1}[optimizer]
        """Numbers in the optimizer's state for each row."""
        copied = {name: rows for name, rows in tables.items() if options.shardings.get(name) == "data-parallel"}
        sharded = {name: rows for name, rows in tables.items() if name not in copied}
        self.copies = CopiedTables(copied, dim, world, self.device, state_width=self.state_width, eps=eps)
        self.sharded = ShardedTables(
            sharded, dim, options, world, pooled=pooled, optimizer=FBGEMM[optimizer], eps=eps, ids=ids,
            batch_size=batch_size, device=self.device, keyed=self._keyed,
        )  # fmt: skip
        parts = self.copies.parts() + self.sharded.parts
        self.parts = [replace(part, state_width=min(self.state_width, part.columns)) for part in parts]
        self._rate = 0.0

    @abstractmethod
    def _keyed(self, batch: Any) -> Any:
        """A batch as TorchRec's KeyedJaggedTensor."""

    def local(self) -> list[tuple[Part, Tensor, Tensor | None]]:
        """This rank's shards and copies: their place, their rows, and the optimizer's state of those."""
        return self.sharded.local() + self.copies.local()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next update, before its rows are looked up."""
        self._rate = float(rate)
        self.sharded.set_rate(self._rate)

    @torch.no_grad()
    def fill(self, table_rows: Callable[[str], Callable[[Tensor, int], None]]) -> None:
        """Write the initial values of a single process; `table_rows` returns what fills rows of a table from one on."""
        count = max(1, CHUNK // self.dim)
        for part, weight_RD, state in self.local():
            fill_rows = table_rows(part.table)
            for start in range(0, part.rows, count):
                # A row is drawn whole, and a shard of some columns keeps those.
                whole = torch.empty(min(count, part.rows - start), self.dim, device=weight_RD.device)
                fill_rows(whole, part.first_row + start)
                columns = slice(part.first_column, part.first_column + part.columns)
                weight_RD[start : start + whole.shape[0]] = whole[:, columns]
            if state is not None:
                state.zero_()
