"""Sums of the weights of pairs of an item and one that follows it, by sorting or in a table: defines the result.

Shapes: E events, P events that others follow, R rows, D distances, W entries, I items,
B histories, L items of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
SPARSE = 16
"""Pairs are counted by sorting them where the matrix has more than this many entries for each."""


@dataclass(frozen=True, eq=False)
class Followed:
    """The sequences, and the events of each item."""

    items: int
    items_E: NDArray[np.int32]
    """Numbers from 1 on."""
    after_E: NDArray[np.uint8]
    """How many of the next events belong to the same sequence; more than the distances need not be said."""
    events_P: NDArray[np.int32]
    """Places of events, by item."""


def count(
    events: Followed, begins_R: Longs, ends_R: Longs, weights_D: Floats, *, pairs: int
) -> tuple[Longs, NDArray[np.int32], Floats]:
    """Rows, columns and sums, by row and column: what follows the events from begin to end in `events_P` at each
    distance, with its weight. The nearest come first, then in the order of events, so that rounding does not depend on
    how events are divided. `pairs` are added up at a time."""
    if len(begins_R) == 1:
        starts = range(int(begins_R[0]), int(ends_R[0]), pairs)
        chunks = [events.events_P[start : min(start + pairs, int(ends_R[0]))] for start in starts]
        parts = [(np.broadcast_to(0, len(chunk)), chunk) for chunk in chunks]
    else:
        rows, places = ranges(begins_R, ends_R - begins_R)
        parts = [(rows, events.events_P[places])]
    counted = PairCounts(len(begins_R), events.items, pairs)
    for distance, weight in enumerate(weights_D.tolist(), 1):
        for rows, chunk in parts:
            follows = events.after_E[chunk] >= distance
            counted.add(rows[follows], events.items_E[chunk[follows] + distance] - 1, weight)
    rows_W, columns_W, sums_W = counted.result()
    return rows_W, columns_W.astype(np.int32), sums_W


def add_rows(
    offsets_I1: Tensor, columns_W: Tensor, values_W: Tensor, history_BL: Tensor, weights_L: Tensor, items: int
) -> Tensor:
    """The sums of the rows of the items of each history, times the weights of their places; 0 is no item. The entries
    of one place meet no column twice, so that a sum does not depend on the order in which a device adds."""
    device = history_BL.device
    sums = torch.zeros(len(history_BL) * items, device=device)
    for items_B, weight in zip(history_BL.unbind(1), weights_L.unbind()):
        begins_B, ends_B = offsets_I1[(items_B - 1).clamp(min=0)], offsets_I1[items_B]
        lengths_B = (ends_B - begins_B) * (items_B > 0)
        shifts_B = begins_B - (lengths_B.cumsum(0) - lengths_B)
        rows_W = torch.repeat_interleave(torch.arange(len(items_B), device=device), lengths_B)
        entries_W = torch.arange(len(rows_W), device=device) + shifts_B[rows_W]
        places_W = rows_W * items + columns_W[entries_W]
        sums.index_add_(0, places_W, values_W[entries_W] * weight)
    return sums.view(-1, items)


def ranges(begins_N: Longs, lengths_N: Longs) -> tuple[Longs, Longs]:
    """The members of ranges of numbers, one range after the other: which range each belongs to, and the number."""
    ranges_P = np.repeat(np.arange(len(lengths_N)), lengths_N)
    shifts_N = begins_N - (np.cumsum(lengths_N) - lengths_N)
    return ranges_P, np.arange(len(ranges_P)) + shifts_N[ranges_P]


class PairCounts:
    """Sums of weights of pairs of a row and a column, added up when there are `pairs` of them."""

    def __init__(self, rows: int, columns: int, pairs: int) -> None:
        self.rows, self.columns, self.pairs, self._pending = rows, columns, pairs, 0
        self._codes: list[Longs] = [np.zeros(0, np.int64)]
        self._weights: list[Floats] = [np.zeros(0)]

    def add(self, rows_P: Longs, columns_P: NDArray[Any], weight: float) -> None:
        self._codes.append(rows_P * self.columns + columns_P)
        self._weights.append(np.full(len(rows_P), weight))
        self._pending += len(rows_P)
        if self._pending >= self.pairs:
            self._add_up()

    def _add_up(self) -> None:
        codes, weights = np.concatenate(self._codes), np.concatenate(self._weights)
        if self.rows * self.columns > SPARSE * len(codes):
            codes_W, places = np.unique(codes, return_inverse=True)
            sums_W = np.bincount(places, weights).astype(np.float64)
        else:
            sums = np.bincount(codes, weights).astype(np.float64)
            codes_W = np.flatnonzero(sums)
            sums_W = sums[codes_W]
        self._codes, self._weights, self._pending = [codes_W], [sums_W], 0

    def result(self) -> tuple[Longs, Longs, Floats]:
        """Rows, columns and sums, by row and column."""
        self._add_up()
        rows_W, columns_W = np.divmod(self._codes[0], self.columns)
        return rows_W, columns_W, self._weights[0]
