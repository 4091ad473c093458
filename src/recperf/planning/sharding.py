"""How training is distributed over ranks, and how many rows of each table a rank is asked for.

Shapes: R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import within
from ..distributed import balance
from ..distributed.config import Demand, DistributedConfig, Table
from ..distributed.placement import ShardPlacement, placed_by
from ..measure.cost import FLOAT
from .skew import PlannedTraffic
from .work import Lengths, Work

HALF = 2
LARGEST_BATCH = 1 << 24
"""Samples of a step at most, as in a config."""
DRAWN = 1 << 16
"""Samples drawn to see how unevenly ranks share a batch."""


@dataclass(frozen=True, kw_only=True)
class Parallelism(DistributedConfig):
    """How training is distributed over ranks: as `recperf run` does it on GPUs, or as another implementation."""

    rank_batch: int | None = None
    """Samples of one rank; None: the global batch size of the config is divided by the ranks."""
    dedup: bool = True
    """An id that occurs several times in a rank's batch is requested once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank_batch is not None:
            within(1, self.rank_batch, LARGEST_BATCH, "rank batch")

    @property
    def number_bytes(self) -> int:
        """Bytes of a number that is sent."""
        return FLOAT if self.all_to_all == "fp32" else HALF


@dataclass(frozen=True)
class PlacedTable(ShardPlacement):
    """The shards of a table, and what ranks ask of them."""

    def rows_requested_R(self, traffic: PlannedTraffic, *, dedup: bool) -> NDArray[np.float64]:
        """Rows that each rank looks up."""
        return self._by_rank_R(traffic.ids_R(dedup))

    def rows_touched_R(self, traffic: PlannedTraffic) -> NDArray[np.float64]:
        """Different rows that each rank updates: of a copy all, by its dense gradient."""
        if self.kind == "data-parallel":
            return self.rows_R.astype(np.float64)
        return self._by_rank_R(traffic.touched_R)

    def _by_rank_R(self, by_block_R: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.kind == "row":
            return by_block_R
        if self.kind == "data-parallel":
            # A rank looks up what its own samples need.
            return np.full_like(by_block_R, by_block_R.mean())
        return np.where(self.width_R > 0, by_block_R.sum(), 0.0)

    def sent_R(self, traffic: PlannedTraffic, batch: int, *, dedup: bool) -> NDArray[np.float64]:
        """Numbers that each rank sends in the forward pass and receives gradients of, including those for itself.

        Bags are summed where their rows are: a rank sends one vector for each bag of every sample of all ranks. Under
        row-wise sharding every rank sends its part of each sum.
        """
        if self.kind == "data-parallel":
            return np.zeros(len(self.width_R))
        if self.table.pooled:
            return self.table.vectors * batch * len(self.width_R) * self.width_R.astype(np.float64)
        return self.rows_requested_R(traffic, dedup=dedup) * self.width_R


def place(tables: tuple[Table, ...], ranks: int, batch: int, parallelism: Parallelism) -> list[PlacedTable]:
    """The shards that a run with `ranks` ranks has."""
    placed = placed_by(parallelism, Demand(tables=tables, batch=batch), ranks)
    return [PlacedTable(one.table, one.kind, one.width_R, one.why) for one in placed]


def copied_numbers(placed: Sequence[ShardPlacement]) -> int:
    """Numbers of the tables that every rank has a copy of: their gradient is summed over the ranks."""
    return sum(one.table.rows * one.table.dim for one in placed if one.kind == "data-parallel")


class RankShare(NamedTuple):
    """The part of a rank with most of it, over the mean of all ranks."""

    work: float = 1.0
    tokens: float = 1.0


def largest_share(work: Work, batch: int, ranks: int, *, balanced: bool) -> RankShare:
    """In a batch drawn from the distribution of lengths: dealt by work, or each rank every n-th sample."""
    if ranks == 1 or work.sample_work is None or len(set(work.lengths)) < 2:
        return RankShare()
    return _drawn_share(work.lengths, work.sample_work, batch, ranks, balanced)


@lru_cache(maxsize=64)
def _drawn_share(
    lengths: Lengths,
    sample_work: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    batch: int,
    ranks: int,
    balanced: bool,
) -> RankShare:
    drawn = max(1, min(ranks, DRAWN // batch))
    lengths_B = np.random.default_rng(0).choice(np.asarray(lengths), size=drawn * batch)
    work_B = sample_work(lengths_B)
    parts = balance.deal(work_B, drawn) if balanced else balance.stride(len(work_B), drawn)
    return RankShare(*(1 + later(ranks, drawn) * (balance.imbalance(of_B, parts) - 1) for of_B in (work_B, lengths_B)))


def later(ranks: int, seen: int) -> float:
    """How much further the last of `ranks` ranks is from the mean than the last of those that were seen."""
    return math.sqrt(math.log(1 + ranks) / math.log(1 + seen)) if ranks > 1 else 0.0
