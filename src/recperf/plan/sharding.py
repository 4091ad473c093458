"""Which rank holds which part of each table, and how many rows it is asked for.

Shapes: R ranks.

| kind | a shard is | ids it receives |
|---|---|---|
| row | a block of consecutive rows, one for each rank | those of its rows |
| column | some columns of all rows | all |
| table | the whole table | all |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..config import require, within
from ..errors import ConfigError, did_you_mean
from ..measure.cost import FLOAT
from .skew import Skew, Traffic
from .work import Table

Kind = Literal["row", "column", "table"]
KINDS: tuple[Kind, ...] = get_args(Kind)
KindOrAuto = Literal["row", "column", "table", "auto"]

COLUMN_WIDTH = 128
"""Minimum number of columns in a shard, as in TorchRec."""
SMALL = 0.5
"""With auto a table stays whole, or in columns, while no rank holds more of it than this share of what a rank holds of
all tables on average: neither of weights nor of vectors in flight."""


Wire = Literal["fp32", "fp16"]
Codec = Literal["in-place", "clamp-copy"]
"""How float32 becomes fp16 before it is sent: written once and clamped there, or clamped into a float32 copy first."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How training is distributed over ranks."""

    rank_batch: int | None = None
    """Samples of one rank; None: the global batch size of the config is divided by the ranks."""
    sharding: KindOrAuto = "auto"
    """Sharding of all tables: row, column, table, or auto."""
    overrides: Mapping[str, KindOrAuto] = field(default_factory=dict)
    """Sharding of single tables."""
    column_width: int = COLUMN_WIDTH
    """Minimum number of columns in a column-wise shard."""
    wire: Wire = "fp16"
    """Number format in which rows and their gradients are sent."""
    codec: Codec = "in-place"
    """How they are converted to it."""
    dedup: bool = True
    """An id that occurs several times in a rank's batch is requested once."""
    pipelined: bool = True
    """The next batch is copied, and its ids sent, during the current step."""
    overlapped: bool = False
    """Dense gradients are summed during the backward pass, as DDP does; recperf's own ranks do it afterwards."""
    balanced: bool = True
    """Samples are dealt to ranks by their work; otherwise rank r of n takes every n-th."""
    input_bytes: int | None = None
    """Bytes of a rank's batch; None: as counted by the workload."""

    def __post_init__(self) -> None:
        if self.rank_batch is not None:
            within(1, self.rank_batch, 1 << 24, "rank batch")
        require(self.wire in ("fp32", "fp16"), "a2a", self.wire, "fp32, fp16")
        require(self.codec in ("in-place", "clamp-copy"), "codec", self.codec, "in-place, clamp-copy")


@dataclass(frozen=True)
class PlacedTable:
    """One table and its shards."""

    table: Table
    kind: Kind
    width_R: NDArray[np.int64]
    """Columns of it on each rank; 0 where a rank holds no shard."""
    why: str = "requested"

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

    def state_R(self) -> NDArray[np.int64]:
        """Bytes of optimizer state; row-wise state is repeated in every column shard."""
        each = self.width_R if self.table.state == self.table.dim else np.minimum(self.width_R, self.table.state)
        return FLOAT * self.rows_R * each

    def rows_requested_R(self, traffic: Traffic, *, dedup: bool) -> NDArray[np.float64]:
        """Rows that each rank looks up in the first batch."""
        return self._by_rank_R(traffic.ids_NR(dedup)[0])

    def rows_touched_R(self, traffic: Traffic) -> NDArray[np.float64]:
        """Different rows that each rank updates in the first batch."""
        return self._by_rank_R(traffic.touched_NR[0])

    def _by_rank_R(self, by_block_R: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.kind == "row":
            return by_block_R
        return np.where(self.width_R > 0, by_block_R.sum(), 0.0)

    def sent_R(self, traffic: Traffic, batch: int, *, dedup: bool) -> NDArray[np.float64]:
        """Numbers that each rank sends in the forward pass and receives gradients of, including those for itself.

        Bags are summed where their rows are: a rank sends one vector for each bag of every sample of all ranks. Under
        row-wise sharding every rank sends its part of each sum.
        """
        if self.table.pooled:
            return self.table.vectors * batch * len(self.width_R) * self.width_R.astype(np.float64)
        return self.rows_requested_R(traffic, dedup=dedup) * self.width_R


def place(tables: tuple[Table, ...], ranks: int, skew: Skew, batch: int, parallelism: Parallelism) -> list[PlacedTable]:
    """Places the largest tables first, each on the ranks that hold least so far. Returns them in the given order."""
    overrides, width, dedup = parallelism.overrides, parallelism.column_width, parallelism.dedup
    within(1, ranks, 1 << 20, "ranks")
    within(1, width, 1 << 16, "column width")
    require_known(tables, overrides)
    by_kind = {t.name: {kind: _shards(t, kind, ranks, width) for kind in KINDS} for t in tables}
    mean_2 = np.sum([_held_2R(by_kind[t.name]["row"], skew, batch, dedup).sum(1) for t in tables], axis=0) / ranks
    selected = [
        _select(by_kind[t.name], overrides.get(t.name, parallelism.sharding), mean_2, skew, batch, dedup)
        for t in tables
    ]
    held_R = np.zeros(ranks)
    placed: dict[str, PlacedTable] = {}
    for one in sorted(selected, key=lambda one: -_bytes_R(one, skew, batch, dedup).max()):
        if one.kind != "row":
            width_R = np.zeros(ranks, np.int64)
            width_R[np.argsort(held_R, kind="stable")] = np.sort(one.width_R)[::-1]
            one = replace(one, width_R=width_R)
        held_R += _bytes_R(one, skew, batch, dedup)
        placed[one.table.name] = one
    return [placed[table.name] for table in tables]


def require_known(tables: tuple[Table, ...], overrides: Mapping[str, KindOrAuto]) -> None:
    names = [table.name for table in tables]
    for name, kind in overrides.items():
        if name not in names:
            raise ConfigError(f"unknown table {name!r}{did_you_mean(name, names)}", where={"tables": ", ".join(names)})
        if kind not in (*KINDS, "auto"):
            raise ConfigError(
                f"unknown sharding {kind!r} of table {name!r}; allowed: row, column, table, auto"
                + did_you_mean(kind, (*KINDS, "auto"))
            )


def _shards(table: Table, kind: Kind, ranks: int, width: int) -> PlacedTable:
    """The shards of a table on the first ranks."""
    width_R = np.zeros(ranks, np.int64)
    if kind == "row":
        width_R[:] = table.dim
    elif kind == "table":
        width_R[0] = table.dim
    else:
        shards = max(1, min(ranks, table.dim // width))
        width_R[:shards] = np.diff(np.linspace(0, table.dim, shards + 1).astype(np.int64))
    return PlacedTable(table, kind, width_R)


def _held_2R(one: PlacedTable, skew: Skew, batch: int, dedup: bool) -> NDArray[np.float64]:
    """Bytes of weights and optimizer state, and bytes of vectors in flight in the first batch."""
    sent_R = one.sent_R(skew.traffic[one.table.name].batch(0), batch, dedup=dedup)
    return np.stack([(one.weight_R + one.state_R()).astype(np.float64), FLOAT * sent_R])


def _bytes_R(one: PlacedTable, skew: Skew, batch: int, dedup: bool) -> NDArray[np.float64]:
    return np.asarray(_held_2R(one, skew, batch, dedup).sum(0))


def _select(
    by_kind: Mapping[Kind, PlacedTable],
    sharding: KindOrAuto,
    mean_2: NDArray[np.float64],
    skew: Skew,
    batch: int,
    dedup: bool,
) -> PlacedTable:
    if sharding != "auto":
        return by_kind[sharding]
    share = {
        kind: float((_held_2R(one, skew, batch, dedup).max(1) / np.maximum(mean_2, 1.0)).max())
        for kind, one in by_kind.items()
    }
    if share["table"] <= SMALL:
        return replace(by_kind["table"], why="small enough to stay whole")
    if share["column"] <= SMALL:
        return replace(by_kind["column"], why="columns are small enough, and equal for any ids")
    best = min(KINDS, key=lambda kind: share[kind])
    return replace(by_kind[best], why="smallest maximum of any rank")
