"""What a rank needs of the tables of a model, and of its memory beside them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..measure.cost import FLOAT


@dataclass(frozen=True, kw_only=True)
class Table:
    name: str
    rows: int
    dim: int
    ids: float
    """Ids that a sample looks up in it."""
    vectors: float
    """Vectors that a sample needs from it: one for each id, or one for each bag of ids."""
    distinct: Callable[[int], float]
    """Expected number of different rows among the ids of that many samples."""
    pooled: bool = False
    """Rows of a bag are summed where they are, and the sum is sent; else each distinct row is sent once."""
    skewed: bool = True
    """Its ids follow the popularity of the data; ids of a hashed feature cross are spread by the hash."""
    state: int = 1
    """Numbers that the optimizer stores for a row."""
    copied: str = ""
    """Why every rank must have a copy; empty: it can be sharded."""

    @property
    def bytes(self) -> int:
        return FLOAT * self.rows * self.dim

    def sent_vectors(self, batch: int) -> float:
        """Vectors that a rank with so many samples receives."""
        return self.vectors * batch if self.pooled else min(self.ids * batch, self.distinct(batch))


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a rank's batch needs of the tables, and of its device beside them."""

    tables: tuple[Table, ...]
    batch: int
    """Samples of one rank."""
    other_bytes: int = 0
    """Memory for everything but tables and what is sent of them: dense parameters, activations, inputs."""
