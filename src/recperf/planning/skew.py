"""How many ids of each table each rank receives on average: spread evenly, or drawn from a power law.

Shapes: R ranks, K kinds of rows of a table.

Row-wise sharding gives rank r the r-th block of ceil(rows / ranks) consecutive rows, as TorchRec does, so popular ids
with neighbouring numbers share a rank. With dedup an id that occurs several times in a rank's batch is requested once;
several ranks may still request the same row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..config import within
from ..errors import UsageError
from .work import Table, Work

Counts = NDArray[np.float64]

HEAD, TAIL = 1024, 2048
"""A power law has a probability for each of its most popular rows, and one for each of TAIL groups of other rows."""


@dataclass(frozen=True, eq=False)
class PlannedTraffic:
    """Ids of one table that each rank receives if its rows are sharded in blocks."""

    raw_R: Counts
    """All ids."""
    unique_R: Counts
    """Each id counted once for each rank that requests it."""
    touched_R: Counts
    """Each id counted once."""

    def ids_R(self, dedup: bool) -> Counts:
        return self.unique_R if dedup else self.raw_R


@dataclass(frozen=True)
class Skew:
    """The traffic of every table, and what it is based on."""

    traffic: dict[str, PlannedTraffic]
    origin: str
    exponent: float | None = None
    """Of the power law that ids were drawn from."""
    draws: Mapping[str, float] = field(default_factory=dict)
    """Independent draws from it that a rank's batch has the different ids of, by table."""

    def distinct_per_sample(self, batch: int) -> dict[str, float]:
        """Different ids in a rank's batch for each of its samples, by table; empty where ids are spread evenly."""
        if self.exponent is None:
            return {}
        return {name: float(one.unique_R.mean()) / batch for name, one in self.traffic.items()}


def even(work: Work, batch: int, ranks: int) -> Skew:
    """Every rank receives equally many ids."""
    return Skew({table.name: _even(table, batch, ranks) for table in work.tables}, "assumed: ids spread evenly")


def zipf(
    work: Work,
    batch: int,
    ranks: int,
    exponent: float,
    *,
    repeated: bool = False,
    source: str = "",
) -> Skew:
    """Row k of a table has a probability proportional to k ** -exponent; hashed crosses are spread evenly. A rank draws
    its ids independently; with `repeated`, only as many of them as give the distinct rows that the workload states: in
    the order of training a batch has many samples of one user, whose histories share most ids."""
    within(0.0, exponent, 20.0, "skew exponent")
    traffic, draws = {}, {}
    for table in work.tables:
        if table.skewed:
            ids = round(table.ids * batch)
            drawn = _draws(table, exponent, table.distinct(batch), ids) if repeated else float(ids)
            draws[table.name] = drawn
            traffic[table.name] = _drawn(table, exponent, ids, drawn, ranks)
        else:
            traffic[table.name] = _even(table, batch, ranks)
    origin = f"Zipf with exponent {exponent:g}{source}, popular ids in the first rows of their tables"
    return Skew(traffic, origin, exponent=exponent, draws=draws)


def kinds(rows: int, exponent: float, blocks: int = 1) -> tuple[Counts, Counts, NDArray[np.int64]]:
    """Rows of about equal popularity, the most popular first: how many each kind has, the probability of one of them,
    and its first row. No kind crosses the border of one of `blocks` blocks of rows."""
    head = min(rows, HEAD)
    borders = np.minimum(-(-rows // blocks) * np.arange(blocks + 1), rows) + 1
    tail = np.geomspace(head + 1, rows + 1, TAIL).astype(np.int64)
    edges = np.unique(np.concatenate([np.arange(1, head + 1), tail, borders]))
    # Sums of k ** -exponent over all rows before an edge: the first ones exactly, then by the Euler-Maclaurin formula.
    first = np.concatenate([[0.0], np.cumsum(np.arange(1.0, head + 1) ** -exponent)])
    after = np.maximum(edges - 0.5, head + 0.5)
    if exponent == 1.0:
        integral = np.log(after / (head + 0.5))
    else:
        integral = (after ** (1 - exponent) - (head + 0.5) ** (1 - exponent)) / (1 - exponent)
    before = first[np.minimum(edges - 1, head)] + integral
    count_K = np.diff(edges).astype(np.float64)
    return count_K, np.diff(before) / before[-1] / count_K, edges[:-1] - 1


def parse(text: str) -> float:
    """The exponent of `--skew zipf:A`."""
    law = re.fullmatch(r"zipf(?::(\d+\.?\d*|\.\d+))?", text)
    if law is None:
        raise UsageError(f"--skew {text!r} is neither even nor a power law", fix="--skew even, or --skew zipf:1.05")
    return float(law[1] or 1.05)


def owners(ids: NDArray[np.int64], table: Table, ranks: int) -> NDArray[np.int64]:
    """The rank that holds the row of each id."""
    return ids // -(-table.rows // ranks)


def _even(table: Table, batch: int, ranks: int) -> PlannedTraffic:
    total = table.ids * batch * ranks
    unique = min(total, table.distinct(batch) * ranks)
    touched = min(unique, table.distinct(batch * ranks), table.rows)
    return PlannedTraffic(*(np.full(ranks, value / ranks) for value in (total, unique, touched)))


def _draws(table: Table, exponent: float, distinct: float, ids: int) -> float:
    """Independent draws whose expected number of different rows is `distinct`; at most `ids`."""
    count_K, share_K, _ = kinds(table.rows, exponent)
    never_K = never(share_K)
    low, high = 0.0, float(ids)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if count_K @ -np.expm1(middle * never_K) >= distinct else (middle, high)
    return high


def never(share_K: Counts) -> Counts:
    """Logarithm of the probability that a draw is another row."""
    return np.asarray(np.log1p(-np.minimum(share_K, 1 - 1e-15)))


def _drawn(table: Table, exponent: float, ids: int, draws: float, ranks: int) -> PlannedTraffic:
    """Each rank's batch has `ids` ids, with as many different ones as `draws` independent draws."""
    count_K, share_K, first_K = kinds(table.rows, exponent, ranks)
    owner_K = owners(first_K, table, ranks)

    def by_rank(values_K: Counts) -> Counts:
        return np.asarray(np.bincount(owner_K, values_K, minlength=ranks), np.float64)

    raw_R, never_K = ids * ranks * by_rank(count_K * share_K), never(share_K)
    unique_R = ranks * by_rank(count_K * -np.expm1(draws * never_K))
    touched_R = by_rank(count_K * -np.expm1(draws * ranks * never_K))
    return PlannedTraffic(raw_R, np.minimum(raw_R, unique_R), touched_R)
