"""The columns of the reference's flat-event cache, computed in blocks from an event store of either layout.

Shapes: E events, U users, B events of a block, A anchors of it.

The users, items, times, types, played ratios and origins of a store decide everything else: `layout` writes these
columns, and `verify` compares those of a cache with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schema import LIKE, LISTEN_PLUS, ORGANIC, SKIP, TYPE_SHIFT
from ..store import COLUMNS, EventStore, file_of, kinds_of
from ..window_build import anchor_chunks
from .cache import FLAT_COLUMNS, reference_ratios

_BITS = {
    "flat_is_organic": ORGANIC,
    "flat_is_listen_plus": LISTEN_PLUS,
    "flat_is_like": LIKE,
    "flat_is_skip": SKIP,
}
_COPIED = {"flat_item_ids": "items", "flat_timestamps": "times", "flat_played_ratio": "ratios"}


def ranges(store: EventStore, block: int) -> Iterator[tuple[int, int]]:
    """The first event of each block and the one after its last."""
    for start in range(0, store.events, block):
        yield start, min(store.events, start + block)


def read_block(store: EventStore, name: str, start: int, stop: int) -> NDArray[Any]:
    """A part of a column of a store."""
    kind, part = np.dtype(COLUMNS[name]), slice(start, stop)
    if store.layout == "packed":
        # A copy: mapped pages would count as memory of the process and break its limit.
        return np.fromfile(file_of(store.folder, name), kind, stop - start, offset=start * kind.itemsize)
    with np.errstate(invalid="ignore"):
        if name in ("items", "times"):
            return (store.items_E if name == "items" else store.times_E)[part].astype(kind)
        ratios_B = reference_ratios(store)[part].astype(COLUMNS["ratios"])
    if name == "ratios":
        return ratios_B
    assert store.types_E is not None
    assert store.flags is not None
    return kinds_of(store.types_E[part].astype(np.uint8), ratios_B, store.flags[3][part] != 0)


def uids_of(store: EventStore, start: int, stop: int) -> NDArray[np.int64]:
    """The users of consecutive events."""
    first = int(np.searchsorted(store.user_first_U1, start, side="right")) - 1
    last = int(np.searchsorted(store.user_first_U1, stop, side="left"))
    edges = np.clip(store.user_first_U1[first : last + 1], start, stop)
    return np.repeat(store.user_ids_U[first:last], np.diff(edges))


def flat_column(store: EventStore, name: str, start: int, stop: int) -> NDArray[Any]:
    """A part of a column of the cache."""
    if name == "flat_uid":
        return uids_of(store, start, stop)
    if name in _COPIED:
        return read_block(store, _COPIED[name], start, stop).astype(FLAT_COLUMNS[name])
    kinds_B = read_block(store, "kinds", start, stop)
    values_B = kinds_B >> TYPE_SHIFT if name == "flat_event_types" else kinds_B & _BITS[name] != 0
    return values_B.astype(FLAT_COLUMNS[name])


def flat_blocks(store: EventStore, name: str, block: int) -> Iterator[NDArray[Any]]:
    """A whole column of the cache in blocks."""
    return (flat_column(store, name, start, stop) for start, stop in ranges(store, block))


def anchors(store: EventStore, kind: str, min_history: int, block: int) -> Iterator[NDArray[np.int64]]:
    """Blocks of a file of anchors: their positions, or for kind `anchor_ts` their times."""
    chunks = anchor_chunks(store, min_history, block, kinds=partial(read_block, store, "kinds"))
    for (start, stop), positions_A in zip(ranges(store, block), chunks, strict=True):
        if kind == "positions":
            yield positions_A
        else:
            yield read_block(store, "times", start, stop)[positions_A - start].astype(np.int64)


def user_column(store: EventStore, name: str) -> NDArray[np.int64]:
    """A table of users: their ids, or by id the position of their first or last event, -1 for an id without events."""
    if name == "unique_uids":
        return store.user_ids_U
    table = np.full(int(store.user_ids_U[-1]) + 1, -1, np.int64)
    table[store.user_ids_U] = store.user_first_U1[:-1] if name == "user_start" else store.user_first_U1[1:]
    return table


def popularity(store: EventStore, block: int) -> NDArray[np.int64]:
    """Number of events of every item, up to the largest item with events."""
    counts = np.zeros(store.items, np.int64)
    for start, stop in ranges(store, block):
        counts += np.bincount(read_block(store, "items", start, stop), minlength=store.items)
    return counts[: np.flatnonzero(counts)[-1] + 1]
