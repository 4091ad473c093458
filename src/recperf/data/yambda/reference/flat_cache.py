"""The columns of the reference's flat-event cache, computed in blocks from a packed store.

Shapes: E events, U users, B events of a block, A anchors of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schema import LIKE, LISTEN_PLUS, LISTENS, ORGANIC, SKIP, TYPE_SHIFT
from ..store import COLUMNS, EventStore, file_of
from .cache import FLAT_COLUMNS, USER_COLUMNS

Tick = Callable[[int], None]
Blocks = Iterator[NDArray[Any]]

_BITS = {
    "flat_is_organic": ORGANIC,
    "flat_is_listen_plus": LISTEN_PLUS,
    "flat_is_like": LIKE,
    "flat_is_skip": SKIP,
}
_COPIED = {"flat_item_ids": "items", "flat_timestamps": "times", "flat_played_ratio": "ratios"}


def read_block(store: EventStore, name: str, start: int, stop: int) -> NDArray[Any]:
    """A copy of a part of a column. Mapped pages would count as memory of the process and break its limit."""
    kind = np.dtype(COLUMNS[name])
    return np.fromfile(file_of(store.folder, name), kind, stop - start, offset=start * kind.itemsize)


def uids_of(store: EventStore, start: int, stop: int) -> NDArray[np.int64]:
    """The users of consecutive events."""
    first, edges = _edges(store, start, stop)
    return np.repeat(store.user_ids_U[first : first + len(edges) - 1], np.diff(edges))


def flat_column(store: EventStore, name: str, block: int, tick: Tick) -> Blocks:
    """The blocks of a column of the cache; `tick` receives the number of events of each block."""
    for start, stop in _ranges(store, block):
        if name == "flat_uid":
            yield uids_of(store, start, stop)
        elif name in _COPIED:
            yield read_block(store, _COPIED[name], start, stop).astype(FLAT_COLUMNS[name])
        else:
            kinds_B = read_block(store, "kinds", start, stop)
            if name == "flat_event_types":
                yield (kinds_B >> TYPE_SHIFT).astype(FLAT_COLUMNS[name])
            else:
                yield (kinds_B & _BITS[name] != 0).astype(FLAT_COLUMNS[name])
        tick(stop - start)


def anchors(store: EventStore, min_history: int, block: int, tick: Tick) -> Blocks:
    """Positions of the listens with at least `min_history` earlier events of their user, ascending."""
    for start, stop in _ranges(store, block):
        listen_B = read_block(store, "kinds", start, stop) & LISTENS != 0
        first, edges = _edges(store, start, stop)
        earliest_B = np.repeat(store.user_first_U1[first : first + len(edges) - 1] + min_history, np.diff(edges))
        yield start + np.flatnonzero(listen_B & (np.arange(start, stop) >= earliest_B))
        tick(stop - start)


def anchor_times(store: EventStore, min_history: int, block: int, tick: Tick) -> Blocks:
    blocks = anchors(store, min_history, block, tick)
    # With the anchors first, zip exhausts their generator, which reports the last block.
    for positions_A, (start, stop) in zip(blocks, _ranges(store, block)):
        yield read_block(store, "times", start, stop)[positions_A - start].astype(np.int64)


def user_column(store: EventStore, name: str) -> NDArray[np.int64]:
    """A table of users: their ids, or by id the position of their first or last event, -1 for an id without events."""
    if name == "unique_uids":
        return store.user_ids_U
    table = np.full(int(store.user_ids_U[-1]) + 1, -1, np.int64)
    table[store.user_ids_U] = store.user_first_U1[:-1] if name == "user_start" else store.user_first_U1[1:]
    return table


def popularity(store: EventStore, block: int, tick: Tick) -> NDArray[np.int64]:
    """Number of events of every item."""
    counts = np.zeros(int(store.manifest["largest_item"]) + 1, np.int64)
    for start, stop in _ranges(store, block):
        counts += np.bincount(read_block(store, "items", start, stop), minlength=len(counts))
        tick(stop - start)
    return counts


def least_bytes(store: EventStore) -> int:
    """Bytes of a cache without its anchors, whose number is not known in advance."""
    headers = 128 * (len(FLAT_COLUMNS) + len(USER_COLUMNS))
    event = sum(np.dtype(kind).itemsize for kind in FLAT_COLUMNS.values())
    return headers + store.events * event + 8 * store.users + 16 * (int(store.user_ids_U[-1]) + 1)


def _ranges(store: EventStore, block: int) -> Iterator[tuple[int, int]]:
    for start in range(0, store.events, block):
        yield start, min(store.events, start + block)


def _edges(store: EventStore, start: int, stop: int) -> tuple[int, NDArray[np.int64]]:
    """The first user of a range of events, and the positions at which the users begin, followed by the range's end."""
    first = int(np.searchsorted(store.user_first_U1, start, side="right")) - 1
    last = int(np.searchsorted(store.user_first_U1, stop, side="left"))
    return first, np.clip(store.user_first_U1[first : last + 1], start, stop)
