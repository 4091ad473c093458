"""Events of Yambda: their types, how much of a track was played, and the byte that a store has for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...events.kinds import LIKE, NEGATIVE, POSITIVE
from ...streaming.features import ORGANIC

EVENT_TYPES: Final = ("listen", "like", "dislike", "unlike", "undislike")
"""The type of an event is an index of this tuple."""
TYPE_SHIFT: Final = 4
"""The type of an event is in bits 4 to 6 of its byte."""
LEAST_PLAYED: Final = 50
"""A listen with at least this played ratio, in percent, is a listen-plus, a positive; any other is a skip."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EventRows:
    """Events by user, then by time; every array has one entry per event."""

    uids: NDArray[np.uint32]
    items: NDArray[np.uint32]
    times: NDArray[np.uint32]
    types: NDArray[np.uint8]
    """Indices of `EVENT_TYPES`."""
    ratios: NDArray[np.uint16]
    """Played ratio in percent, 0 where the event is no listen."""
    organic: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.uids)

    def where(self, mask: NDArray[np.bool_]) -> EventRows:
        return self if mask.all() else EventRows(**{name: column[mask] for name, column in vars(self).items()})

    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns of a store."""
        kinds = kinds_of(self.types, self.ratios, self.organic)
        return {"uids": self.uids, "items": self.items, "times": self.times, "kinds": kinds}


def kinds_of(
    types: NDArray[np.uint8], ratios_pct: NDArray[np.uint16], organic: NDArray[np.bool_] | NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """The bytes of events from type, played ratio (0 for null) and whether they were organic."""
    listen = types == 0
    plus = listen & (ratios_pct >= LEAST_PLAYED)
    kinds = plus.astype(np.uint8) * np.uint8(POSITIVE)
    kinds |= (listen & ~plus).astype(np.uint8) * np.uint8(NEGATIVE)
    kinds |= (types == 1).astype(np.uint8) * np.uint8(LIKE)
    kinds |= (organic != 0).astype(np.uint8) * np.uint8(ORGANIC)
    kinds |= types << np.uint8(TYPE_SHIFT)
    return np.asarray(kinds, dtype=np.uint8)


def count_by_type(by_kind: dict[str, int]) -> dict[str, int]:
    """The number of events of each type, from that of each byte."""
    types = [int(kind) >> TYPE_SHIFT for kind in by_kind]
    counts = np.bincount(types, [*by_kind.values()], len(EVENT_TYPES)).astype(int).tolist()
    return dict(zip(EVENT_TYPES, counts))
