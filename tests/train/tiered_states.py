"""A small table in tiers for the tests of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recperf.models.init import initial_rows
from recperf.models.tiers.cache import TieredRows
from recperf.models.tiers.columns import RowBlock, TableColumns
from recperf.models.tiers.config import TablesConfig
from recperf.models.tiers.store import HostRows

R, D = 50, 3
UNIFORM = {"kind": "uniform", "bound": 0.25, "seed": 7}
PATTERN = {"kind": "pattern", "rows": 30, "dim": D, "std": 0.5, "seed": 1, "name": "table.b"}
STACKED = {"kind": "stacked", "parts": [{"rows": 20, "initial": UNIFORM}, {"rows": 30, "initial": PATTERN}]}


def initial_table(initial: dict[str, Any] = UNIFORM) -> Tensor:
    rows_RD = torch.empty(R, D)
    initial_rows(initial, (R, D))(rows_RD, 0)
    return rows_RD


class Table:
    """Weights and a number of state for each row, in a cache of some rows before host memory. A rank has only some."""

    def __init__(self, initial: dict[str, Any] = UNIFORM, *, first: int = 0, rows: int = R) -> None:
        self.rows, store = rows, HostRows(rows, D + 1)
        self.tiers = TieredRows(
            {"t": rows}, store, dim=D, slots=9, config=TablesConfig(), device=torch.device("cpu")
        )  # fmt: skip
        first_RD, blocks = initial_table(initial), [RowBlock(first, rows, 0)]
        self.tiers.initial = lambda name, rows_N: first_RD[rows_N + first]
        weights = TableColumns(self.tiers, (R, D), blocks, slice(0, D), initial)
        state = TableColumns(self.tiers, (R,), blocks, slice(D, D + 1), {"kind": "zero"})
        self.state = {"tables.t": weights, "tables.t_state": state}

    def train(self, rows: Tensor, draw: torch.Generator) -> None:
        for part in rows.split(8):
            placed = self.tiers.place({"t": part}, self)
            slots = placed.slots["t"]
            self.tiers.cache_SD[slots] = torch.randn(len(slots), D, generator=draw)
            self.tiers.state_SK[slots] = torch.randn(len(slots), 1, generator=draw)
            self.tiers.finish(placed)

    def plain(self) -> dict[str, Tensor]:
        """The same state all in memory."""
        records = self.tiers.records({"t": torch.arange(self.rows)})
        return {"tables.t": records[:, :D].clone(), "tables.t_state": records[:, D].clone()}


def draws(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
