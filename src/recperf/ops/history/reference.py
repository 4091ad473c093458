"""Histories in plain numpy, the definition that the C body must match, with the arguments and results of both.

Shapes: E events, I items of the catalogue, B samples, R samples of one part, W the widest scan among them, T events of
history in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...config import require
from ...errors import DataError
from ..hashing import xxh64

Words = NDArray[np.uint32] | NDArray[np.int64]

ACTION_BITS = 7
"""The bits of a kind that say which actions the event is: 1, 2 and 4."""
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
    """One byte per event, whose low three bits are the actions that the event is."""
    flags: tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]] | None = None
    """In place of the kinds: whether each event is action 1, 2 and 4."""

    def actions(self, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The actions that the events at these positions are, as bits."""
        if self.kinds_E is not None:
            return self.kinds_E[positions] & np.uint8(ACTION_BITS)
        assert self.flags is not None
        first, second, third = (column[positions].astype(np.uint8) for column in self.flags)
        return np.asarray(first | second << 1 | third << 2, np.uint8)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A history is the last `cap` events of each action, merged in their order; of these the newest `most`."""

    actions: tuple[int, ...]
    """One to three; an event is an action if its kind has one of the action's bits."""
    cap: int
    most: int

    def __post_init__(self) -> None:
        require(1 <= len(self.actions) <= 3, "actions", self.actions, "one to three")
        require(self.cap >= 1, "cap", self.cap, "at least 1")
        require(self.most >= 1, "most", self.most, "at least 1")

    @property
    def longest(self) -> int:
        """The largest number of events before the cut to `most`."""
        return self.cap * len(self.actions)


@dataclass(frozen=True, kw_only=True, eq=False)
class Picked:
    """The events of a batch's histories, sample after sample."""

    offsets_B1: NDArray[np.int64]
    """Where each sample's history begins among T."""
    places_T: NDArray[np.uint32]
    """The distance of each event from the begin of its sample's scan."""
    actions_T: NDArray[np.uint8]
    """The actions of each event, as bits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HistoryArrays:
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


PART = 1 << 20
"""Events scanned at a time, about 30 bytes of memory each; a sample that scans more is a part by itself."""

Positions = NDArray[np.int64]


def pick(events: Events, begin_B: Positions, positions_B: Positions, rule: Rule) -> Picked:
    """Choose the events of each sample's history among begin <= position < anchor."""
    offsets_B1 = np.zeros(len(positions_B) + 1, np.int64)
    places, actions = [np.empty(0, np.uint32)], [np.empty(0, np.uint8)]
    widest = int((positions_B - begin_B).max(initial=0))
    samples = max(1, PART // max(1, widest))
    for first in range(0, len(positions_B), samples):
        part = slice(first, first + samples)
        places_RW, actions_RW = _scanned(events, begin_B[part], positions_B[part])
        picked_RW = _in_history(actions_RW, rule)
        offsets_B1[1:][part] = picked_RW.sum(1)
        places.append(places_RW[picked_RW].astype(np.uint32))
        actions.append(actions_RW[picked_RW])
    return Picked(offsets_B1=np.cumsum(offsets_B1), places_T=np.concatenate(places), actions_T=np.concatenate(actions))


def lengths(events: Events, begin_B: Positions, positions_B: Positions, rule: Rule) -> Positions:
    """The number of events that `pick` picks for each sample."""
    return np.diff(pick(events, begin_B, positions_B, rule).offsets_B1)


def _scanned(events: Events, begin_R: Positions, positions_R: Positions) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Places and actions of scans side by side, aligned at their anchors; 0 before the begin of a scan."""
    counts_R = positions_R - begin_R
    width = int(counts_R.max())
    places_RW = np.arange(width) + (counts_R - width)[:, None]
    before_RW = places_RW < 0
    # Places before the begin read the first event of the scan, or of an empty scan the anchor: both exist.
    places_RW[before_RW] = 0
    actions_RW = events.actions(begin_R[:, None] + places_RW)
    actions_RW[before_RW] = 0
    return places_RW, actions_RW


def _in_history(actions_RW: NDArray[np.uint8], rule: Rule) -> NDArray[np.bool_]:
    picked_RW = np.zeros(actions_RW.shape, np.bool_)
    for action in rule.actions:
        hits_RW = (actions_RW & np.uint8(action)) > 0
        picked_RW |= hits_RW & (_from_the_end(hits_RW) <= rule.cap)
    return picked_RW & (_from_the_end(picked_RW) <= rule.most)


def _from_the_end(hits_RW: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The number of hits from each place to the end of its row."""
    return np.cumsum(hits_RW[:, ::-1], axis=1, dtype=np.int32)[:, ::-1]


def fill(events: Events, begin_B: Positions, picked: Picked, room: HistoryArrays) -> None:
    """Write the items, artists, albums and times of the picked events."""
    positions_T = np.repeat(begin_B, np.diff(picked.offsets_B1)) + picked.places_T
    items_T = events.items_E[positions_T].astype(np.int64)
    if len(items_T) and not 0 <= items_T.min() <= items_T.max() < len(events.catalogue_I2):
        raise DataError(unknown_item(len(events.catalogue_I2)))
    rows_T2 = events.catalogue_I2[items_T]
    if rows_T2.max(initial=0) > MOST_ID:
        raise DataError(LARGE_ID)
    room.items_T[:] = items_T
    room.artists_T[:] = rows_T2[:, 0]
    room.albums_T[:] = rows_T2[:, 1]
    room.times_T[:] = events.times_E[positions_T]


def crosses(columns_KB: Positions, crosses: Crosses, out_CB: NDArray[np.int32]) -> None:
    """Write the row of every cross feature: the hash of some columns, modulo the rows of the cross."""
    for parts_W, rows, out_B in zip(crosses.parts_CW, crosses.rows_C, out_CB, strict=True):
        out_B[:] = xxh64([columns_KB[part] for part in parts_W if part >= 0]) % np.uint64(rows)
