"""Which rank holds which part of each table: `recperf plan` predicts this placement and `recperf run` carries it out.
Torch-free.

Shapes: R ranks.

| kind | a shard is | ids it receives |
|---|---|---|
| row | a block of consecutive rows, one for each rank | those of its rows |
| column | some columns of all rows | all |
| table | the whole table | all |
| data-parallel | a copy of the table on every rank | none: a rank looks up its own |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..config import within
from ..errors import ConfigError
from ..measure.cost import FLOAT
from .config import Demand, DistributedConfig, Kind, KindOrAuto, Table

LEAST_COLUMNS = 4
"""fbgemm reads rows four numbers at a time."""
COLUMN_WIDTH = 128
"""Minimum number of columns in a shard, as in TorchRec; a table that is no wider is divided evenly."""
REQUESTED = "--distributed.sharding"
"""Why a table has the kind that the user named."""


@dataclass(frozen=True)
class ShardPlacement:
    """One table and its shards."""

    table: Table
    kind: Kind
    width_R: NDArray[np.int64]
    """Columns of it on each rank; 0 where a rank holds no shard."""
    why: str = REQUESTED

    @property
    def rows_R(self) -> NDArray[np.int64]:
        """Rows of it on each rank; the last block may be shorter."""
        ranks = len(self.width_R)
        if self.kind != "row":
            return np.where(self.width_R > 0, self.table.rows, 0)
        block = -(-self.table.rows // ranks)
        return np.clip(self.table.rows - block * np.arange(ranks), 0, block)

    @property
    def weight_R(self) -> NDArray[np.int64]:
        """Bytes of its weights on each rank."""
        return FLOAT * self.rows_R * self.width_R

    @property
    def state_width_R(self) -> NDArray[np.int64]:
        """Numbers of optimizer state for a row on each rank; row-wise state is repeated in every column shard."""
        state, dim = self.table.state, self.table.dim
        return state // dim * self.width_R + np.minimum(self.width_R, state % dim)

    def state_R(self) -> NDArray[np.int64]:
        """Bytes of optimizer state on each rank."""
        return FLOAT * self.rows_R * self.state_width_R

    def held_R(self, batch: int) -> NDArray[np.float64]:
        """Bytes of weights, of optimizer state and of vectors in flight on each rank."""
        ranks = len(self.width_R)
        vectors = ranks * self.table.sent_vectors(batch)
        if self.kind == "data-parallel":
            vectors = 0.0
        elif self.kind == "row" and not self.table.pooled:
            vectors /= ranks
        return np.asarray(self.weight_R + self.state_R() + FLOAT * vectors * self.width_R)


def placed_by(options: DistributedConfig, demand: Demand, ranks: int) -> list[ShardPlacement]:
    """The shards of each table with the options of a run."""
    placed = place(demand.tables, ranks, demand.batch, options.kind, options.shardings)
    require_sent(placed, options.all_to_all)
    return placed


def require_sent(placed: Sequence[ShardPlacement], precision: str) -> None:
    """Fail on a precision of messages that are never sent."""
    if precision != "fp32" and all(one.kind == "data-parallel" for one in placed):
        raise ConfigError(
            f"distributed.all_to_all {precision}: every rank has a copy of every table, so no rows are sent",
            where={"field": "distributed.all_to_all"},
            fix="--distributed.all-to-all fp32",
        )


def place(
    tables: Sequence[Table],
    ranks: int,
    batch: int,
    kind: KindOrAuto = "auto",
    named: Mapping[str, KindOrAuto] | None = None,
) -> list[ShardPlacement]:
    """Shards of each table; `named` has the kind of single tables. The largest tables are placed first, each on the
    ranks that hold least so far, counting weights, optimizer state and what they send in a step."""
    within(1, ranks, 1 << 20, "ranks")
    mean = sum(_shards(table, "row", ranks).held_R(batch).mean() for table in tables)
    selected = []
    for table in tables:
        table_kind, why = _kind(table, ranks, batch, kind, named or {}, mean)
        selected.append(replace(_shards(table, table_kind, ranks), why=why))
    held_R = np.zeros(ranks)
    placed: dict[str, ShardPlacement] = {}
    for one in sorted(selected, key=lambda one: -one.held_R(batch).max()):
        if one.kind in ("column", "table"):
            width_R = np.zeros(ranks, np.int64)
            width_R[np.argsort(held_R, kind="stable")] = np.sort(one.width_R)[::-1]
            one = replace(one, width_R=width_R)
        held_R += one.held_R(batch)
        placed[one.table.name] = one
    return [placed[table.name] for table in tables]


def _kind(
    table: Table, ranks: int, batch: int, kind: KindOrAuto, named: Mapping[str, KindOrAuto], mean: float
) -> tuple[Kind, str]:
    """The kind of a table, and why it has it.

    Single rows are sent once by whoever holds them, so blocks of rows spread that work evenly. A bag in blocks of rows
    is sent by every rank, each its part of the sum; so a table of bags stays whole while it is no larger than what a
    rank holds on average. Columns only on request: row-wise Adagrad then has a state per shard, and a run should not
    train differently because it has more ranks.
    """
    requested = named.get(table.name, kind)
    if table.copied:
        if requested not in ("auto", "data-parallel"):
            setting = f"{table.name}={requested}" if table.name in named else requested
            raise ConfigError(
                f"distributed.sharding {setting}: {table.copied}, which TorchRec's divided tables cannot; every rank "
                "has a copy",
                where={"field": "distributed.sharding", "table": table.name},
                fix=f"{table.name}=data-parallel, or an optimizer that changes only rows that were used",
            )
        return "data-parallel", table.copied
    if requested in ("row", "auto") and not rows_for_all(table.rows, ranks):
        if named.get(table.name) == "row":
            raise ConfigError(
                f"distributed.sharding {table.name}=row: {table.rows} rows are too few for {ranks} ranks",
                where={"field": "distributed.sharding"},
                fix=f"{table.name}=table",
            )
        return "table", "too few rows for a block on every rank"
    if requested != "auto":
        return requested, REQUESTED
    if ranks == 1:
        return "table", "there is one rank"
    if not table.pooled:
        return "row", "every rank sends its share of the rows"
    if _shards(table, "table", ranks).held_R(batch).max() <= mean:
        return "table", "small enough to stay whole: each sum is sent once"
    return "row", "too large for one rank"


def rows_for_all(rows: int, ranks: int) -> bool:
    """Whether every rank gets rows: fbgemm has no CPU operator for an empty shard. Ranks get blocks of one size."""
    return -(-rows // ranks) * (ranks - 1) < rows


def shard_columns(dim: int, ranks: int) -> int:
    """Columns of a column-wise shard: all shards are equally wide, and there are at most as many as ranks."""
    even = -(-dim // ranks)
    narrowest = max(even, COLUMN_WIDTH) if dim > COLUMN_WIDTH else even
    return next((width for width in range(narrowest, dim) if dim % width == 0 and width % LEAST_COLUMNS == 0), dim)


def _shards(table: Table, kind: Kind, ranks: int) -> ShardPlacement:
    """The shards of a table on the first ranks."""
    width_R = np.zeros(ranks, np.int64)
    if kind in ("row", "data-parallel"):
        width_R[:] = table.dim
    else:
        width = table.dim if kind == "table" else shard_columns(table.dim, ranks)
        width_R[: table.dim // width] = width
    return ShardPlacement(table, kind, width_R)


@dataclass(frozen=True, kw_only=True)
class TableShard:
    """A shard: a rectangle of a table, on one rank."""

    table: str
    rank: int
    kind: str
    first_row: int
    rows: int
    first_column: int
    columns: int
    why: str
    state_width: int
    """Numbers that the optimizer keeps per row of this part; row-wise Adagrad keeps one."""
    memory: Literal["device", "host", "file"] = "device"
    """Where its rows lie."""

    @property
    def nbytes(self) -> int:
        """Rows and optimizer state."""
        return 4 * self.rows * (self.columns + self.state_width)


def shards_of(
    placed: Sequence[ShardPlacement], memory: Literal["device", "host", "file"] = "device"
) -> list[TableShard]:
    """The shards of tables, by table and rank, and the memory of those that are not copies. Of a data-parallel table
    each rank has a copy."""
    shards = []
    for one in placed:
        row, column, where = 0, 0, "device" if one.kind == "data-parallel" else memory
        rows_R, state_width_R = one.rows_R.tolist(), one.state_width_R.tolist()
        for rank in np.flatnonzero(one.width_R).tolist():
            rows, columns = rows_R[rank], int(one.width_R[rank])
            shards.append(
                TableShard(
                    table=one.table.name, rank=rank, kind=one.kind, memory=where, first_row=row, rows=rows,
                    first_column=column, columns=columns, why=one.why, state_width=state_width_R[rank],
                )
            )  # fmt: skip
            row += rows if one.kind == "row" else 0
            column += columns if one.kind == "column" else 0
    return shards


def plan_text(parts: list[TableShard]) -> str:
    """Which rank holds what, as a table to read."""
    rows = [["rank", "table", "kind", "memory", "rows", "columns", "bytes", "why"]]
    for part in sorted(parts, key=lambda part: (part.rank, part.table, part.first_row, part.first_column)):
        rows.append([
            str(part.rank), part.table, part.kind, part.memory,
            f"{part.first_row:,} to {part.first_row + part.rows - 1:,}",
            f"{part.first_column} to {part.first_column + part.columns - 1}", f"{part.nbytes:,}", part.why,
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
