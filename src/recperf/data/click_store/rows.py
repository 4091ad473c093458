"""Click rows in memory, and what an order of batches reads. Torch-free.

Shapes: N rows, D numbers, S slots of ids (one for each id a row can have).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "valid"]
EMPTY = -1
"""In the slots of a feature with several ids: no id."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some click rows, copied into memory."""

    dense_ND: NDArray[np.float32]
    ids_NS: NDArray[np.int32]
    labels_N: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, order_N: NDArray[np.int64]) -> Rows:
        """The same rows in another order."""
        return Rows(self.dense_ND.take(order_N, axis=0), self.ids_NS.take(order_N, axis=0), self.labels_N.take(order_N))


class ClickRows(Protocol):
    """What an order reads: click rows by their position within the training or the validation rows."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the sparse features."""
        ...

    @property
    def slots(self) -> tuple[int, ...]:
        """Most ids a row has of each of them."""
        ...

    def count(self, split: Split) -> int: ...

    def rows_of(self, split: Split, first: int, last: int) -> Rows: ...

    def take(self, split: Split, places: NDArray[np.int64]) -> Rows:
        """Single rows, in any order; only these are read."""
        ...
