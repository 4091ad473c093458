"""What every implementation is given, and the errors they share.

Shapes: B samples, T events of history in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...data.yambda.schema import MOST_ID
from ...data.yambda.store import EventStore
from ...errors import DataError


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A history is the last `cap` events of each pool, merged in their order; of these the newest `most`."""

    pools: tuple[int, ...]
    """Up to three; an event is in a pool when its kind has one of the pool's bits."""
    cap: int
    most: int

    @property
    def longest(self) -> int:
        """Events that can be picked before the cut to `most`."""
        return self.cap * len(self.pools)


@dataclass(frozen=True, kw_only=True, eq=False)
class Picked:
    """The events of a batch's histories, sample after sample."""

    offsets_B1: NDArray[np.int64]
    """Where each sample's history begins among T."""
    places_T: NDArray[np.uint32]
    """How far each event is from the first that was looked at for its sample."""
    actions_T: NDArray[np.uint8]
    """The pools each event is in, as bits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """Where what the events hold is written."""

    items_T: NDArray[np.int32]
    artists_T: NDArray[np.int32]
    albums_T: NDArray[np.int32]
    times_T: NDArray[np.int64]


def unknown_item(store: EventStore) -> DataError:
    return _damaged(store, f"an event has an item outside the catalogue of {store.items:,} items")


def large_id(store: EventStore) -> DataError:
    return _damaged(store, f"the catalogue has an artist or album id above {MOST_ID:,}")


def _damaged(store: EventStore, what: str) -> DataError:
    fix = f"recperf data check {store.name}; if it is damaged, prepare it again"
    return DataError(what, where={"store": store.folder}, fix=fix)
