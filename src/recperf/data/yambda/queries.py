"""What a model is asked: an item for a user at a moment.

Shapes: B samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Queries:
    """Candidates at a moment, which need not be events of the store."""

    users_B: Ints
    """Places of the users in the store; -1 for a user that it does not have."""
    ends_B: Ints
    """Positions before which the histories end; of an event, its own position."""
    items_B: Ints
    times_B: Ints
    organic_B: Ints
    """1 where the user found the item without a recommendation."""

    def __len__(self) -> int:
        return len(self.ends_B)

    def __getitem__(self, rows: slice) -> Queries:
        return Queries(*(column[rows] for column in vars(self).values()))
