"""The arguments, the result and the error messages that the implementations share.

Shapes: E events, I items of the catalogue, B samples, T events of history in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...config import require

Words = NDArray[np.uint32] | NDArray[np.int64]

POOLS = 7
"""The bits of a kind that say in which pools the event is: 1, 2 and 4."""
MOST_ID = (1 << 31) - 1
"""Batches hold ids as int32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """Columns of E events, ordered by user and time, and the catalogue of I items."""

    items_E: Words
    times_E: Words
    catalogue_I2: NDArray[np.uint32]
    """Artist and album of every item."""
    kinds_E: NDArray[np.uint8] | None = None
    """One byte per event, whose low three bits are the pools the event is in."""
    flags: tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]] | None = None
    """In place of the kinds: whether each event is in pool 1, 2 and 4."""

    def pools(self, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The pools that the events at these positions are in, as bits."""
        if self.kinds_E is not None:
            return self.kinds_E[positions] & np.uint8(POOLS)
        assert self.flags is not None
        first, second, third = (column[positions].astype(np.uint8) for column in self.flags)
        return np.asarray(first | second << 1 | third << 2, np.uint8)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A history is the last `cap` events of each pool, merged in their order; of these the newest `most`."""

    pools: tuple[int, ...]
    """One to three; an event is in a pool if its kind has one of the pool's bits."""
    cap: int
    most: int

    def __post_init__(self) -> None:
        require(1 <= len(self.pools) <= 3, "pools", self.pools, "one to three")
        require(self.cap >= 1, "cap", self.cap, "at least 1")
        require(self.most >= 1, "most", self.most, "at least 1")

    @property
    def longest(self) -> int:
        """The largest number of events before the cut to `most`."""
        return self.cap * len(self.pools)


@dataclass(frozen=True, kw_only=True, eq=False)
class Picked:
    """The events of a batch's histories, sample after sample."""

    offsets_B1: NDArray[np.int64]
    """Where each sample's history begins among T."""
    places_T: NDArray[np.uint32]
    """The distance of each event from the begin of its sample's scan."""
    actions_T: NDArray[np.uint8]
    """The pools each event is in, as bits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """The arrays that `fill` writes."""

    items_T: NDArray[np.int32]
    artists_T: NDArray[np.int32]
    albums_T: NDArray[np.int32]
    times_T: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Crosses:
    """Cross features: the columns that each hashes together, at most three (-1: no further one), and its rows."""

    parts_CW: NDArray[np.int64]
    rows_C: NDArray[np.int64]

    @staticmethod
    def of(crosses: Sequence[tuple[tuple[int, ...], int]]) -> Crosses:
        parts = [(*columns, -1, -1)[:3] for columns, _ in crosses]
        return Crosses(parts_CW=np.array(parts, np.int64), rows_C=np.array([rows for _, rows in crosses], np.int64))

    def __post_init__(self) -> None:
        require(self.parts_CW.shape == (len(self.rows_C), 3), "parts_CW", self.parts_CW.shape, "three for each cross")
        require(bool((self.rows_C > 0).all()), "rows_C", self.rows_C, "at least 1 each")

    @cached_property
    def last(self) -> int:
        """The last column that is read."""
        return int(self.parts_CW.max(initial=-1))

    @cached_property
    def addresses(self) -> tuple[int, int]:
        return int(self.parts_CW.ctypes.data), int(self.rows_C.ctypes.data)


LARGE_ID = f"the catalogue has an artist or album id above {MOST_ID:,}"


def unknown_item(items: int) -> str:
    return f"an event has an item outside the catalogue of {items:,} items"
