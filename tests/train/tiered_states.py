"""A table in tiers for the tests of checkpoints: records in a dictionary, and what a plain training would have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recperf.train.checkpoint_rows import initial_rows

R, D = 50, 3
UNIFORM = {"kind": "uniform", "bound": 0.25, "seed": 7}
PATTERN = {"kind": "pattern", "rows": 30, "dim": D, "std": 0.5, "seed": 1, "name": "table.b"}
STACKED = {"kind": "stacked", "parts": [{"rows": 20, "initial": UNIFORM}, {"rows": 30, "initial": PATTERN}]}


def initial_table(initial: dict[str, Any] = UNIFORM) -> Tensor:
    rows_RD = torch.empty(R, D)
    initial_rows(initial, (R, D))(rows_RD, 0)
    return rows_RD


@dataclass
class Table:
    """Weights and a number of state for each row that was written."""

    initial: dict[str, Any] = field(default_factory=lambda: UNIFORM)
    records: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """Generation and record by row."""
    generation: int = 1

    def __post_init__(self) -> None:
        self.first_RD = initial_table(self.initial)

    def record(self, row: int) -> Tensor:
        if row in self.records:
            return self.records[row][1]
        return torch.cat([self.first_RD[row], torch.zeros(1)])

    def write(self, rows: Tensor, values: Tensor, columns: slice = slice(None)) -> None:
        for row, value in zip(rows.tolist(), values):
            record = self.record(row).clone()
            record[columns] = value
            self.records[row] = (self.generation, record)

    def state(self) -> dict[str, Any]:
        """As a trial has it."""
        return {"tables.t": Leaf(self, slice(0, D), (R, D), self.initial),
                "tables.t_state": Leaf(self, slice(D, D + 1), (R,), {"kind": "zero"})}  # fmt: skip

    def plain(self) -> dict[str, Tensor]:
        """The same state all in memory."""
        whole = torch.stack([self.record(row) for row in range(R)])
        return {"tables.t": whole[:, :D].clone(), "tables.t_state": whole[:, D].clone()}


@dataclass(frozen=True)
class Leaf:
    table: Table
    columns: slice
    shape: tuple[int, ...]
    initial: dict[str, Any]
    dtype: torch.dtype = torch.float32
    in_files = False

    def written(self) -> int:
        return len(self.table.records)

    def changed(self, since: int) -> tuple[Tensor, int]:
        rows = sorted(row for row, (generation, _) in self.table.records.items() if generation > since)
        self.table.generation += 1
        return torch.tensor(rows, dtype=torch.int64), self.table.generation - 1

    def values(self, rows_N: Tensor) -> Tensor:
        records = [self.table.records[row][1][self.columns] for row in rows_N.tolist()]
        return torch.stack(records).reshape(len(rows_N), *self.shape[1:])

    def load(self, rows_N: Tensor, values: Tensor) -> None:
        self.table.write(rows_N, values, self.columns)

    def clear(self) -> None:
        self.table.records.clear()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two plain states are equal to the bit."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one
    )
