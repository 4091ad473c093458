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
class Placed:
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
        return np.minimum(self.width_R, state) if state % dim else state // dim * self.width_R

    def state_R(self) -> NDArray[np.int64]:
        """Bytes of optimizer state on each rank."""
        return FLOAT * self.rows_R * self.state_width_R


def placed_by(options: DistributedConfig, demand: Demand, ranks: int) -> list[Placed]:
    """The shards of each table with the options of a run."""
    placed = place(demand.tables, ranks, demand.batch, options.kind, options.shardings)
    require_sent(placed, options.all_to_all)
    return placed


def require_sent(placed: Sequence[Placed], precision: str) -> None:
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
) -> list[Placed]:
    """Shards of each table; `named` has the kind of single tables. The largest tables are placed first, each on the
    ranks that hold least so far, counting weights, optimizer state and what they send in a step."""
    within(1, ranks, 1 << 20, "ranks")
    mean = sum(_bytes_R(_shards(table, "row", ranks), batch).mean() for table in tables)
    selected = []
    for table in tables:
        table_kind, why = _kind(table, ranks, batch, kind, named or {}, mean)
        selected.append(replace(_shards(table, table_kind, ranks), why=why))
    held_R = np.zeros(ranks)
    placed: dict[str, Placed] = {}
    for one in sorted(selected, key=lambda one: -_bytes_R(one, batch).max()):
        if one.kind in ("column", "table"):
            width_R = np.zeros(ranks, np.int64)
            width_R[np.argsort(held_R, kind="stable")] = np.sort(one.width_R)[::-1]
            one = replace(one, width_R=width_R)
        held_R += _bytes_R(one, batch)
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
    if _bytes_R(_shards(table, "table", ranks), batch).max() <= mean:
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


def _shards(table: Table, kind: Kind, ranks: int) -> Placed:
    """The shards of a table on the first ranks."""
    width_R = np.zeros(ranks, np.int64)
    if kind in ("row", "data-parallel"):
        width_R[:] = table.dim
    else:
        width = table.dim if kind == "table" else shard_columns(table.dim, ranks)
        width_R[: table.dim // width] = width
    return Placed(table, kind, width_R)


def _bytes_R(one: Placed, batch: int) -> NDArray[np.float64]:
    """Bytes of weights, of optimizer state and of vectors in flight."""
    ranks = len(one.width_R)
    vectors = ranks * one.table.sent_vectors(batch)
    if one.kind == "data-parallel":
        vectors = 0.0
    elif one.kind == "row" and not one.table.pooled:
        vectors /= ranks
    return np.asarray(one.weight_R + one.state_R() + FLOAT * vectors * one.width_R)
