"""Which samples of a batch are a rank's, batches that bring the next one along, and scores of all ranks' samples.

Shapes: B samples of this rank, N samples of an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from .world import World

T = TypeVar("T")


def count(rank: int, size: int, samples: int) -> int:
    """Samples of a batch that are this rank's: r, r + n, r + 2n..."""
    return len(range(rank, samples, size))


def with_next(batches: Iterator[T], known: Callable[[T], bool]) -> Iterator[tuple[T, T | None]]:
    """Each with the one after it, or none where that is not to be known yet."""
    current = next(batches, None)
    while current is not None:
        following = next(batches, None) if known(current) else None
        yield current, following
        current = next(batches, None) if following is None else following


class Scores:
    """Logits and labels of an evaluation, each row scored by one rank."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._found = [torch.zeros(3, 0, dtype=torch.float64)]

    def add(self, logits_B: Tensor, labels_B: Tensor, samples: int) -> None:
        """This rank's part of a batch of so many samples; one that has none of them brought something else."""
        rank, size = self.world.rank, self.world.size
        # A row's score, label and how often it was scored: zeros where other ranks have theirs.
        found_3N = torch.zeros(3, samples, dtype=torch.float64)
        if count(rank, size, samples):
            found_3N[0, rank::size] = logits_B.double().cpu()
            found_3N[1, rank::size] = labels_B.double().cpu()
            found_3N[2, rank::size] += 1
        self._found.append(found_3N)

    def of_all(self, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Of all ranks, in the order of the rows; so many, where that is known."""
        found_3N = self.world.sum_(torch.cat(self._found, 1))
        if rows not in (None, found_3N.shape[1]) or not bool((found_3N[2] == 1).all()):
            raise RuntimeError("a row was scored by no rank, or by two")
        return found_3N[0].float(), found_3N[1].float()
