"""Histories in plain numpy: the definition that the C body must match.

Shapes: B samples, R samples of one part, W the widest scan among them, T events of history in the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..xxh64 import xxh64
from .rule import LARGE_ID, MOST_ID, Crosses, Events, Picked, Room, Rule, unknown_item

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
    actions_RW = events.pools(begin_R[:, None] + places_RW)
    actions_RW[before_RW] = 0
    return places_RW, actions_RW


def _in_history(actions_RW: NDArray[np.uint8], rule: Rule) -> NDArray[np.bool_]:
    picked_RW = np.zeros(actions_RW.shape, np.bool_)
    for pool in rule.pools:
        hits_RW = (actions_RW & np.uint8(pool)) > 0
        picked_RW |= hits_RW & (_from_the_end(hits_RW) <= rule.cap)
    return picked_RW & (_from_the_end(picked_RW) <= rule.most)


def _from_the_end(hits_RW: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The number of hits from each place to the end of its row."""
    return np.cumsum(hits_RW[:, ::-1], axis=1, dtype=np.int32)[:, ::-1]


def fill(events: Events, begin_B: Positions, picked: Picked, room: Room) -> None:
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
