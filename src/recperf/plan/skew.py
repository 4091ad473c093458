"""How many ids of each table go to which rank: from all rows alike, a power law, or the batches of a dataset.

Shapes: N global batches, R ranks, K rows of a table.

Row-wise sharding gives rank r the r-th block of ceil(rows / ranks) consecutive rows, as TorchRec does; so popular ids
that lie side by side share a rank. `hashed` stands for a table whose ids went through a hash first. Ids repeated on a
rank travel once with dedup; different ranks may still ask for the same row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ..config import within
from ..errors import DataError, UsageError
from ..ops.splitmix import GOLDEN, finalise_numpy_
from .work import Table, Work

if TYPE_CHECKING:
    from ..data.yambda.store import EventStore
    from ..data.yambda.windows import WindowIndex

Counts = NDArray[np.float64]

DENSE = 16
"""Places for each id up to which a table of counts is made."""
DRAWN = 16
"""Batches drawn from a power law, for the worst of them."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """Ids of one table that arrive at each rank if its rows are shared out by blocks."""

    raw_NR: Counts
    """As many as are asked for."""
    unique_NR: Counts
    """Without those a rank asks for twice."""
    touched_NR: Counts
    """Different rows, whoever asks."""

    def ids_NR(self, dedup: bool) -> Counts:
        return self.unique_NR if dedup else self.raw_NR

    def batch(self, number: int) -> Traffic:
        one = slice(number, number + 1)
        return Traffic(self.raw_NR[one], self.unique_NR[one], self.touched_NR[one])

    def scaled(self, factor: float) -> Traffic:
        """Of a batch `factor` times as large; of distinct ids that is an upper bound above 1 and a lower one below."""
        return Traffic(factor * self.raw_NR, factor * self.unique_NR, factor * self.touched_NR)

    @property
    def batches(self) -> int:
        return len(self.raw_NR)


@dataclass(frozen=True)
class Skew:
    """The traffic of every table, and what it rests on."""

    traffic: dict[str, Traffic]
    origin: str
    batches: int
    mean_history: float | None = None
    """Of the batches read, where they were."""

    def items_a_sample(self, batch: int) -> float | None:
        """Different items of a rank's batch for each of its samples, where a dataset's batches were counted."""
        if self.mean_history is None or "item_id" not in self.traffic:
            return None
        unique_NR = self.traffic["item_id"].unique_NR
        return float(unique_NR.sum(1).mean() / (unique_NR.shape[1] * batch))

    def scaled(self, factor: float) -> Skew:
        return Skew({name: one.scaled(factor) for name, one in self.traffic.items()}, self.origin, self.batches)


def even(work: Work, batch: int, ranks: int) -> Skew:
    """Every rank is asked for as much as every other."""
    return Skew({table.name: _even(table, batch, ranks) for table in work.tables}, "assumed: ids spread evenly", 1)


def zipf(work: Work, batch: int, ranks: int, exponent: float, *, hashed: bool = False, seed: int = 0) -> Skew:
    """The k-th row of a table has a share proportional to k to the minus `exponent`; hashed crosses stay even."""
    within(0.0, exponent, 20.0, "skew exponent")
    found = {}
    for table in work.tables:
        if not table.skewed:
            found[table.name] = _even(table, batch, ranks)
            continue
        found[table.name] = _drawn(table, exponent, round(table.ids * batch), ranks, hashed, seed)
    told = f"zipf with exponent {exponent:g}, popular ids {'spread by a hash' if hashed else 'first in their tables'}"
    return Skew(found, told, DRAWN)


@lru_cache(maxsize=4)
def popularity(rows: int, exponent: float) -> Counts:
    """Shares of a table's rows, the most popular first."""
    share_K = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return np.asarray(share_K / share_K.sum())


def parse(text: str) -> float | Path:
    """What --skew names: `zipf:A` or a dataset."""
    if not text.startswith("zipf"):
        return Path(text)
    try:
        return float(text.removeprefix("zipf").removeprefix(":") or "1.05")
    except ValueError:
        raise UsageError(
            f"--skew {text!r} has no exponent", fix="--skew zipf:1.05, or the folder of a dataset"
        ) from None


def owners(ids: NDArray[Any], table: Table, ranks: int, *, hashed: bool) -> NDArray[np.int64]:
    """The rank that holds each id's row. Tables are hashed each in its own way: their hot ids need not meet."""
    if not hashed:
        return np.asarray(ids // -(-table.rows // ranks), dtype=np.int64)
    words = ids.astype(np.uint64) + np.uint64(GOLDEN + crc32(table.name.encode()))
    return np.asarray(finalise_numpy_(words) % np.uint64(ranks), dtype=np.int64)


def _even(table: Table, batch: int, ranks: int) -> Traffic:
    total = table.ids * batch * ranks
    unique = min(total, table.distinct(batch) * ranks)
    touched = min(unique, table.distinct(batch * ranks), table.rows)
    return Traffic(*(np.full((1, ranks), value / ranks) for value in (total, unique, touched)))


def _drawn(table: Table, exponent: float, ids: int, ranks: int, hashed: bool, seed: int) -> Traffic:
    """`ids` of each rank's batch, drawn one by one."""
    share_K = popularity(table.rows, exponent)
    owner_K = owners(np.arange(table.rows), table, ranks, hashed=hashed)

    def by_rank(values_K: Counts) -> Counts:
        return np.asarray(np.bincount(owner_K, values_K, minlength=ranks), np.float64)

    # Rounding must not make the shares add up to more than one.
    mass_R = by_rank(share_K)
    mass_R /= mass_R.sum()
    never_K = np.log1p(-np.minimum(share_K, 1 - 1e-12))
    unique_R = ranks * by_rank(-np.expm1(ids * never_K))
    touched_R = by_rank(-np.expm1(ids * ranks * never_K))
    raw_NR = np.random.default_rng(seed).multinomial(ids * ranks, mass_R, size=DRAWN).astype(np.float64)
    same = (DRAWN, ranks)
    return Traffic(raw_NR, np.minimum(raw_NR, np.broadcast_to(unique_R, same)), np.broadcast_to(touched_R, same))


def from_store(
    path: Path, config: Any, work: Work, batch: int, ranks: int, *, hashed: bool = False, batches: int = 4
) -> Skew:
    """Of real global batches of a dataset's training windows, `batches` of them spread over the stream.

    Rank r takes every `ranks`-th anchor from the r-th on, as the benchmark does.
    """
    within(1, batches, 1 << 16, "skew batches")
    if not hasattr(config.data, "history"):
        raise UsageError("a dataset's ids are read for dlrm-v4 only", fix="--skew zipf:1.05")
    from ..data.yambda.history import Histories
    from ..data.yambda.reference.cache import open_events
    from ..data.yambda.windows import WindowIndex

    store = open_events(path)
    index = WindowIndex.open(store, config.data.windows)
    anchors = _stream(store, index, batch * ranks)
    starts = np.linspace(0, len(anchors) - batch * ranks, batches).astype(np.int64)
    histories = Histories(store, config.data.history)
    tables = {table.name: table for table in work.tables}
    counted = {name: np.zeros((3, batches, ranks)) for name in tables}
    largest = dict.fromkeys(tables, 0)
    events = 0
    for number, start in enumerate(starts):
        chosen = anchors[start : start + batch * ranks]
        seen: dict[str, list[NDArray[np.int64]]] = {name: [] for name in tables}
        for rank in range(ranks):
            made = histories.batch(chosen[rank::ranks])
            events += len(made.times_T)
            for name, ids in _ids_by_table(made, tables).items():
                unique, times = counted_ids(ids)
                owner = owners(unique, tables[name], ranks, hashed=hashed)
                counted[name][0, number] += np.bincount(owner, times, minlength=ranks)
                counted[name][1, number] += np.bincount(owner, minlength=ranks)
                seen[name].append(unique)
                largest[name] = max(largest[name], int(unique[-1]))
        for name, table in tables.items():
            touched, _ = counted_ids(np.concatenate(seen[name]))
            owner = owners(touched, table, ranks, hashed=hashed)
            counted[name][2, number] = np.bincount(owner, minlength=ranks)
    told = f"counted: {batches} batches of {store.name}, ids {'hashed' if hashed else 'as they are'}"
    low = [name for name, table in tables.items() if table.skewed and largest[name] < table.rows // ranks]
    if low and not hashed:
        told += f"; all ids of {', '.join(low)} lie in the first rank's rows: the data is smaller than the tables"
    mean = events / (batches * batch * ranks)
    return Skew({name: Traffic(*counts) for name, counts in counted.items()}, told, batches, mean)


def _stream(store: EventStore, index: WindowIndex, needed: int) -> NDArray[np.int64]:
    """Anchors of the training windows in their order, from the last windows back, enough for some batches."""
    found: list[NDArray[np.int64]] = []
    for window in reversed(range(max(1, index.windows - 1))):
        found.insert(0, index.order(window, "train"))
        if sum(map(len, found)) >= 64 * needed:
            break
    anchors = np.concatenate(found)
    if len(anchors) < needed:
        raise DataError(
            f"a global batch has {needed:,} samples, and there are {len(anchors):,} anchors to take them from",
            where={"store": store.folder},
            fix="a smaller --global-batch, or --data.windows.min-history",
        )
    return anchors


def _ids_by_table(made: Any, tables: dict[str, Table]) -> dict[str, NDArray[np.int64]]:
    from ..models.dlrm_v4.config import FEATURE_TABLES

    found: dict[str, list[NDArray[np.int64]]] = {}
    for feature, name in FEATURE_TABLES.items():
        found.setdefault(name, []).append(made.features[feature][0].numpy())
    return {name: _within(np.concatenate(parts), tables[name].rows) for name, parts in found.items()}


def _within(ids: NDArray[Any], rows: int) -> NDArray[Any]:
    return ids % rows if ids.max(initial=0) >= rows else ids


def counted_ids(ids: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Different ids in their order, and how often each comes; ids that lie close are counted without sorting."""
    if int(ids.max(initial=0)) > DENSE * len(ids):
        unique, times = np.unique(ids, return_counts=True)
        return unique.astype(np.int64), times
    times_K = np.bincount(ids)
    unique = np.flatnonzero(times_K)
    return unique, times_K[unique]
