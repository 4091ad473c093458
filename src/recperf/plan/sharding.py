"""Which rank holds what of each table, and what it is asked for.

Shapes: R ranks.

| kind | a shard is | ids that reach it |
|---|---|---|
| row | a block of consecutive rows, one a rank | those of its rows |
| column | some columns of all rows | all |
| table | the table | all |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..config import within
from ..errors import ConfigError, closest
from ..measure.cost import FLOAT
from .skew import Skew, Traffic
from .work import Table

Kind = Literal["row", "column", "table"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Wish = Literal["row", "column", "table", "auto"]

COLUMN_WIDTH = 128
"""Columns a shard has at least, TorchRec's own bound."""
SMALL = 0.5
"""With auto a table stays whole, or in columns, while no rank has more of it than this share of what a rank has of all
tables on average: neither of their rows nor of vectors on their way."""


@dataclass(frozen=True)
class Placed:
    """One table with its place on the ranks."""

    table: Table
    kind: Kind
    width_R: NDArray[np.int64]
    """Columns each rank has of it; 0 where it has none."""
    why: str

    @property
    def rows_R(self) -> NDArray[np.int64]:
        """Rows each rank has of it, the last block cut short."""
        ranks = len(self.width_R)
        if self.kind != "row":
            return np.where(self.width_R > 0, self.table.rows, 0)
        block = -(-self.table.rows // ranks)
        return np.clip(self.table.rows - block * np.arange(ranks), 0, block)

    @property
    def weight_R(self) -> NDArray[np.int64]:
        """Bytes of its rows on each rank."""
        return FLOAT * self.rows_R * self.width_R

    def state_R(self) -> NDArray[np.int64]:
        """Bytes the optimizer keeps; one number a row is kept by every column shard again."""
        each = self.width_R if self.table.state == self.table.dim else np.minimum(self.width_R, self.table.state)
        return FLOAT * self.rows_R * each

    def rows_asked_R(self, traffic: Traffic, *, dedup: bool) -> NDArray[np.float64]:
        """Rows each rank looks up in the first of the batches."""
        return self._spread_R(traffic.ids_NR(dedup)[0])

    def rows_touched_R(self, traffic: Traffic) -> NDArray[np.float64]:
        """Different rows each rank updates."""
        return self._spread_R(traffic.touched_NR[0])

    def _spread_R(self, by_block_R: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.kind == "row":
            return by_block_R
        return np.where(self.width_R > 0, by_block_R.sum(), 0.0)

    def sent_R(self, traffic: Traffic, batch: int, *, dedup: bool) -> NDArray[np.float64]:
        """Numbers each rank sends out forward, and gets the gradients of; what it keeps for itself included.

        Bags are summed where their rows are: a rank sends a vector a bag of every sample of all ranks, and under
        row-wise sharding every rank sends its part of each sum.
        """
        if self.table.pooled:
            return self.table.vectors * batch * len(self.width_R) * self.width_R.astype(np.float64)
        return self.rows_asked_R(traffic, dedup=dedup) * self.width_R


def place(
    tables: tuple[Table, ...],
    ranks: int,
    skew: Skew,
    batch: int,
    *,
    wish: Wish = "auto",
    overrides: Mapping[str, Wish] | None = None,
    width: int = COLUMN_WIDTH,
    dedup: bool = True,
) -> list[Placed]:
    """Tables in their order. The largest choose their ranks first, those with the least on them."""
    within(1, ranks, 1 << 20, "ranks")
    within(1, width, 1 << 16, "column width")
    overrides = overrides or {}
    require_known(tables, overrides)
    held_R = np.zeros(ranks)
    alone = {t.name: {kind: _alone(t, kind, ranks, width) for kind in KINDS} for t in tables}
    fair_2 = np.sum([_held_2R(alone[t.name]["row"], skew, batch, dedup).sum(1) for t in tables], axis=0) / ranks
    placed: dict[str, Placed] = {}
    chosen = {t.name: _chosen(alone[t.name], overrides.get(t.name, wish), fair_2, skew, batch, dedup) for t in tables}
    for name, (one, why) in sorted(chosen.items(), key=lambda item: -_bytes_R(item[1][0], skew, batch, dedup).max()):
        if one.kind != "row":
            shards = np.sort(one.width_R)[::-1]
            moved = np.zeros(ranks, np.int64)
            moved[np.argsort(held_R, kind="stable")] = shards
            one = Placed(one.table, one.kind, moved, why)
        else:
            one = Placed(one.table, one.kind, one.width_R, why)
        held_R += _bytes_R(one, skew, batch, dedup)
        placed[name] = one
    return [placed[table.name] for table in tables]


def require_known(tables: tuple[Table, ...], overrides: Mapping[str, Wish]) -> None:
    names = [table.name for table in tables]
    for name, kind in overrides.items():
        if name not in names:
            guess = closest(name, names)
            raise ConfigError(
                f"there is no table {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
                where={"tables": ", ".join(names)},
            )
        if kind not in (*KINDS, "auto"):
            guess = closest(kind, (*KINDS, "auto"))
            raise ConfigError(
                f"table {name!r} cannot be sharded {kind!r}; allowed: row, column, table, auto"
                + (f"; did you mean {guess!r}?" if guess else "")
            )


def _alone(table: Table, kind: Kind, ranks: int, width: int) -> Placed:
    """As if it were the only table."""
    width_R = np.zeros(ranks, np.int64)
    if kind == "row":
        width_R[:] = table.dim
    elif kind == "table":
        width_R[0] = table.dim
    else:
        shards = max(1, min(ranks, table.dim // width))
        width_R[:shards] = np.diff(np.linspace(0, table.dim, shards + 1).astype(np.int64))
    return Placed(table, kind, width_R, "asked for")


def _held_2R(one: Placed, skew: Skew, batch: int, dedup: bool) -> NDArray[np.float64]:
    """Bytes of rows with their state, and of vectors on their way in the first batch."""
    sent_R = one.sent_R(skew.traffic[one.table.name].batch(0), batch, dedup=dedup)
    return np.stack([(one.weight_R + one.state_R()).astype(np.float64), FLOAT * sent_R])


def _bytes_R(one: Placed, skew: Skew, batch: int, dedup: bool) -> NDArray[np.float64]:
    return np.asarray(_held_2R(one, skew, batch, dedup).sum(0))


def _chosen(
    kinds: Mapping[Kind, Placed],
    wish: Wish,
    fair_2: NDArray[np.float64],
    skew: Skew,
    batch: int,
    dedup: bool,
) -> tuple[Placed, str]:
    if wish != "auto":
        return kinds[wish], "asked for"
    most = {
        kind: float((_held_2R(one, skew, batch, dedup).max(1) / np.maximum(fair_2, 1.0)).max())
        for kind, one in kinds.items()
    }
    if most["table"] <= SMALL:
        return kinds["table"], "small enough to stay whole"
    if most["column"] <= SMALL:
        return kinds["column"], "in columns small enough, whatever its ids"
    best = min(KINDS, key=lambda kind: most[kind])
    return kinds[best], "no rank has so much of it any other way"
