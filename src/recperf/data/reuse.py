"""How large a cache of table rows serves which share of a log: a miss-ratio curve from LRU stack distances.

Time passes in training batches, and within a batch a row counts once: the distance of a use is the number of distinct
rows used since the row's last use. A cache of C rows that drops the least recently used ones serves exactly the uses at
a distance below C. Only rows whose hash lies below a threshold are followed (SHARDS: Waldspurger et al., FAST 2015);
the threshold is halved whenever more than a fixed number of rows would be followed, so memory does not grow with the
tables.

Shapes: U distinct rows of a batch, S of them that are followed, K rows followed in all, G groups of rows, D classes of
distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import require, within
from ..ops.xxh64 import xxh64

FOLLOWED = 1 << 16
"""Rows that are followed at most, by default."""
GROUPS = 16
"""Groups that the followed rows are divided into at random: how much these differ tells the error."""
_EXACT, _OCTAVES = 128, 42
SIZES_D = np.concatenate(
    [np.arange(_EXACT), *(np.arange(_EXACT // 2, _EXACT) << octave for octave in range(1, _OCTAVES))]
)
"""The smallest distance of each class, and so the cache sizes for which uses are counted: every size below 128, then 64
in each doubling. The last class, beyond any table, is that of first uses."""

_SPARSE = 16
"""In tables with more rows than this for each lookup, sorting the lookups is faster than marking their rows."""

Words = NDArray[np.int64]


class Reuse:
    """Counts the uses of rows by their distance from the last use, batch after batch."""

    def __init__(self, rows: Sequence[int], *, followed: int = FOLLOWED) -> None:
        within(1, followed, 1 << 28, "followed")
        require(len(rows) >= 1, "rows", tuple(rows), "at least one table")
        self._starts_T1 = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._most = followed
        self.batches = 0
        self.most_in_batch = 0
        """Distinct rows of the largest batch."""
        self.uses = 0
        """All uses, whether a row is followed or not."""
        self._counts_GD: Words = np.zeros((GROUPS, len(SIZES_D)), np.int64)
        """Uses by distance; a use of a followed row stands for all that it was sampled from."""
        self._halvings = 0
        self._rows_K: Words = np.zeros(0, np.int64)
        """The followed rows, ascending."""
        self._times_K: Words = np.zeros(0, np.int64)
        """When each was last used, as a number of its own."""
        self._last = np.zeros(4 * followed, np.bool_)
        """Which times are the last use of a row."""
        self._now = 0

    @property
    def rate(self) -> float:
        """The share of all rows that is followed."""
        return 0.5**self._halvings

    @property
    def nbytes(self) -> int:
        """Memory of everything that is kept between batches."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))

    def add(self, tables: Sequence[NDArray[Any]]) -> None:
        """Count a batch: the rows it looks up in each table, in any order and with repeats."""
        starts_T, rows_T = self._starts_T1[:-1], np.diff(self._starts_T1)
        distinct = [_distinct(rows_N, rows) for rows_N, rows in zip(tables, rows_T.tolist(), strict=True)]
        rows_U = np.concatenate([start + rows_N for start, rows_N in zip(starts_T, distinct)])
        self.batches += 1
        self.most_in_batch = max(self.most_in_batch, len(rows_U))
        self.uses += len(rows_U)
        rows_S = rows_U[self._follows(rows_U)]
        while len(rows_S) > self._most:
            self._follow_half()
            rows_S = rows_S[self._follows(rows_S)]
        if self._now + len(rows_S) > len(self._last):
            self._renumber()
        places_S = np.searchsorted(self._rows_K, rows_S)
        known_S = np.zeros(len(rows_S), np.bool_)
        inside_S = places_S < len(self._rows_K)
        known_S[inside_S] = self._rows_K[places_S[inside_S]] == rows_S[inside_S]
        self._count(rows_S, known_S, places_S)
        self._use(rows_S, known_S, places_S)
        while len(self._rows_K) > self._most:
            self._follow_half()

    def misses(self, slots: int) -> int:
        """Returns the number of uses that a cache of `slots` rows, shared by all tables, does not serve."""
        return int(self._counts_GD[:, _class_of(slots) :].sum())

    @property
    def first(self) -> int:
        """First uses: how many rows are used at all."""
        return int(self._counts_GD[:, -1].sum())

    def served(self, slots: int) -> float:
        """Returns the share of the uses that a cache of `slots` rows serves."""
        # Not by the sampled uses: whether one of the few hottest rows is followed or not would change them.
        return max(0.0, 1.0 - self.misses(slots) / self.uses) if self.uses else 1.0

    def slots_for(self, share: float) -> int | None:
        """The smallest cache that serves this share of all uses; None where first uses alone are more than the rest."""
        misses_D = self._counts_GD.sum(0)[::-1].cumsum()[::-1]
        enough = np.flatnonzero(misses_D <= (1.0 - share) * self.uses + 1e-9)
        return int(SIZES_D[enough[0]]) if len(enough) and enough[0] < len(SIZES_D) - 1 else None

    def error(self, slots: int) -> float:
        """Returns the standard error of `served`: 0 where every row was followed."""
        if not self._halvings or not self.uses:
            return 0.0
        misses_G = self._counts_GD[:, _class_of(slots) :].sum(1) * (GROUPS / self.uses)
        of_uses = float(misses_G.std(ddof=1)) / GROUPS**0.5
        # So many followed rows are in a cache of this size only on average.
        spread = (slots / self.rate) ** 0.5
        low, high = (self.served(max(0, round(slots + side * spread))) for side in (-1, 1))
        return float(np.hypot(of_uses, (high - low) / 2))

    def _follows(self, rows_N: Words) -> NDArray[np.bool_]:
        if not self._halvings:
            return np.ones(len(rows_N), np.bool_)
        return np.asarray(xxh64([rows_N]) >> np.uint64(64 - self._halvings) == 0)

    def _follow_half(self) -> None:
        self._halvings += 1
        follows_K = self._follows(self._rows_K)
        self._last[self._times_K[~follows_K]] = False
        self._rows_K, self._times_K = self._rows_K[follows_K], self._times_K[follows_K]

    def _renumber(self) -> None:
        """Number the times of last uses without gaps."""
        order_K = np.argsort(self._times_K)
        self._now = len(order_K)
        self._times_K[order_K] = np.arange(self._now)
        self._last[:] = False
        self._last[: self._now] = True

    def _count(self, rows_S: Words, known_S: NDArray[np.bool_], places_S: Words) -> None:
        classes_S = np.full(len(rows_S), len(SIZES_D) - 1)
        until_N = np.cumsum(self._last[: self._now], dtype=np.int64)
        later = len(self._rows_K) - until_N[self._times_K[places_S[known_S]]]
        classes_S[known_S] = _class_of(later << self._halvings)
        groups_S = (xxh64([rows_S]) % np.uint64(GROUPS)).astype(np.int64)
        np.add.at(self._counts_GD, (groups_S, classes_S), 1 << self._halvings)

    def _use(self, rows_S: Words, known_S: NDArray[np.bool_], places_S: Words) -> None:
        """Make the rows the most recent ones; which of a batch is older, a hash decides, as popular rows may have low
        numbers."""
        times_S = np.empty(len(rows_S), np.int64)
        times_S[np.argsort(xxh64([rows_S]))] = self._now + np.arange(len(rows_S))
        self._last[self._times_K[places_S[known_S]]] = False
        self._last[times_S] = True
        self._now += len(rows_S)
        self._times_K[places_S[known_S]] = times_S[known_S]
        new_S = ~known_S
        self._rows_K = np.insert(self._rows_K, places_S[new_S], rows_S[new_S])
        self._times_K = np.insert(self._times_K, places_S[new_S], times_S[new_S])


def _distinct(rows_N: NDArray[Any], rows: int) -> Words:
    """Returns the sorted unique row numbers of a table with `rows` rows."""
    if rows <= _SPARSE * len(rows_N):
        used_R = np.zeros(rows, np.bool_)
        used_R[rows_N] = True
        return np.flatnonzero(used_R)
    # np.unique takes ten times as long.
    sorted_N = np.sort(rows_N.astype(np.int64))
    return sorted_N[np.flatnonzero(np.diff(sorted_N, prepend=-1))]


def _class_of(distances: Words | int) -> Words:
    """The class of each distance; caches between two counted sizes count as the smaller one."""
    return np.searchsorted(SIZES_D[:-1], distances, side="right") - 1
