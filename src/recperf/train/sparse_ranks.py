"""Ranks of targets by scores of which most are 0, or by how often items were taken: no matrix of targets by items.

Shapes: B targets, I items (column k is item k + 1), W entries of a sparse matrix, H hidden pairs. A code is the number
of a target times the number of items, plus the column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Hidden:
    """The items that do not compete for each target."""

    items: int
    codes_H: Longs
    """Ascending, each once."""

    @staticmethod
    def of(items: int, rows_P: Longs, columns_P: Longs) -> Hidden:
        return Hidden(items, np.unique(rows_P * items + columns_P))

    def has(self, codes_W: Longs) -> NDArray[np.bool_]:
        return member(codes_W, self.codes_H) >= 0

    def counts(self, targets: int) -> Longs:
        """How many there are for each target."""
        counts_B: Longs = np.bincount(self.codes_H // self.items, minlength=targets)
        return counts_B


def member(codes_W: Longs, sorted_H: Longs) -> Longs:
    """The place of each code among others, which ascend; -1 where it is none of them."""
    if not len(sorted_H):
        return np.full(len(codes_W), -1)
    places_W = np.searchsorted(sorted_H, codes_W).clip(max=len(sorted_H) - 1)
    return np.where(sorted_H[places_W] == codes_W, places_W, -1)


def added_up(codes_W: Longs, values_W: Floats) -> tuple[Longs, Floats]:
    """The codes, ascending and each once, and the sums of their values, in the order of the entries."""
    distinct_W, places_W = np.unique(codes_W, return_inverse=True)
    return distinct_W, np.bincount(places_W, values_W, len(distinct_W)).astype(np.float64)


def ranked_sums(codes_W: Longs, sums_W: Floats, columns_B: Longs, hidden: Hidden) -> Longs:
    """The rank of each target by these sums, which are above 0; all other items have 0. Items with the sum of the
    target count as ranked before it."""
    own_B = np.arange(len(columns_B)) * hidden.items + columns_B
    there_W = ~hidden.has(codes_W)
    codes_W, sums_W = codes_W[there_W], sums_W[there_W]
    rows_W, places_B = codes_W // hidden.items, member(own_B, codes_W)
    sums_B = np.append(sums_W, 0.0)[places_B]
    before_B = np.bincount(rows_W[sums_W >= sums_B[rows_W]], minlength=len(own_B))
    ranks_B: Longs = np.where(sums_B > 0, before_B, hidden.items - hidden.counts(len(own_B)))
    ranks_B[hidden.has(own_B)] = hidden.items
    return ranks_B


def rank_by_counts(counts_I: NDArray[Any], column: int, hidden_H: Longs) -> int:
    """The rank of an item by how often each was taken; `hidden_H` are the columns that do not compete."""
    own = counts_I[column]
    if (hidden_H == column).any():
        return len(counts_I)
    return int(np.count_nonzero(counts_I >= own) - np.count_nonzero(counts_I[hidden_H] >= own))
