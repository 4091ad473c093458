"""Histories by plain numpy: what is right, by definition.

Shapes: B samples, R samples of one part, W the widest scan among them, T events of history in the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...data.yambda.schema import POOLS
from ...data.yambda.store import EventStore
from .rule import MOST_ID, Room, Rule, large_id, unknown_item

PART = 1 << 20
"""Events looked at at once, about 30 bytes of memory each; a sample that scans more is a part of its own."""

Positions = NDArray[np.int64]


def pick(
    store: EventStore, begin_B: Positions, positions_B: Positions, rule: Rule
) -> tuple[Positions, NDArray[np.uint32]]:
    """Where each sample's history begins among T, and the places of its events."""
    offsets_B1 = np.zeros(len(positions_B) + 1, np.int64)
    parts = []
    widest = int((positions_B - begin_B).max(initial=0))
    samples = max(1, PART // max(1, widest))
    for first in range(0, len(positions_B), samples):
        part = slice(first, first + samples)
        kept_RW, places_RW = _kept(store, begin_B[part], positions_B[part], rule)
        offsets_B1[1:][part] = kept_RW.sum(1)
        parts.append(places_RW[kept_RW])
    np.cumsum(offsets_B1, out=offsets_B1)
    return offsets_B1, np.concatenate([np.empty(0, np.uint32), *parts])


def _kept(
    store: EventStore, begin_R: Positions, positions_R: Positions, rule: Rule
) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
    """Scans side by side, ending together at their anchors, so that counting backwards is one cumulative sum."""
    counts_R = positions_R - begin_R
    width = int(counts_R.max())
    places_RW = np.arange(width) + (counts_R - width)[:, None]
    inside_RW = places_RW >= 0
    places_RW = np.maximum(places_RW, 0)
    # A scan of nothing reads its anchor instead, which is in the store and then masked out.
    kinds_RW = store.kinds(begin_R[:, None] + places_RW) & np.uint8(POOLS)
    kinds_RW[~inside_RW] = 0
    kept_RW = np.zeros_like(inside_RW)
    for pool in rule.pools:
        hits_RW = (kinds_RW & np.uint8(pool)) > 0
        kept_RW |= hits_RW & (_from_the_end(hits_RW) <= rule.cap)
    kept_RW &= _from_the_end(kept_RW) <= rule.most
    return kept_RW, places_RW.astype(np.uint32)


def _from_the_end(hits_RW: NDArray[np.bool_]) -> NDArray[np.int32]:
    """How many hits there are from each place to the end of its row."""
    return np.cumsum(hits_RW[:, ::-1], axis=1, dtype=np.int32)[:, ::-1]


def fill(
    store: EventStore, begin_B: Positions, offsets_B1: Positions, places_T: NDArray[np.uint32], room: Room
) -> None:
    """Write what the picked events hold."""
    positions_T = np.repeat(begin_B, np.diff(offsets_B1)) + places_T
    items_T = store.items_E[positions_T].astype(np.int64)
    if len(items_T) and not 0 <= items_T.min() <= items_T.max() < store.items:
        raise unknown_item(store)
    pairs_T2 = store.catalogue_I2[items_T]
    if pairs_T2.max(initial=0) > MOST_ID:
        raise large_id(store)
    room.items_T[:] = items_T
    room.artists_T[:] = pairs_T2[:, 0]
    room.albums_T[:] = pairs_T2[:, 1]
    room.actions_T[:] = store.kinds(positions_T) & np.uint8(POOLS)
    room.times_T[:] = store.times_E[positions_T]
