"""Batches of in-memory samples, in an order that is a pure function of (seed, epoch).

Shapes: N samples, B samples a batch, F sparse features, D dense features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .batch import ClickBatch, JaggedFeatures, Tensors, largest_ids


@dataclass(frozen=True)
class RankPart:
    """The samples of every batch that one of several ranks makes: rank, rank + ranks, rank + 2 ranks and so on."""

    rank: int = 0
    ranks: int = 1

    def own(self, samples: int) -> range:
        """Their places in a batch of so many samples."""
        return range(self.rank, samples, self.ranks)

    def made(self, samples: int) -> range:
        """The same, but the first sample where there is none: a rank never makes an empty batch."""
        return self.own(samples) or range(1)

    def rows(self, first: int, last: int, batch_size: int, end: int) -> NDArray[np.int64]:
        """Which rows of first .. last - 1 are made, of consecutive batches that end with row `end`."""
        rows_N = np.arange(first, last)
        place_N = rows_N % batch_size
        samples_N = np.minimum(batch_size, end - (rows_N - place_N))
        instead_N = (self.rank >= samples_N) & (place_N == 0)
        made_N: NDArray[np.int64] = rows_N[(place_N % self.ranks == self.rank) | instead_N]
        return made_N


WHOLE = RankPart()


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples(Tensors):
    """A whole split as tensors, one id per feature and sample. Shuffling is fastest if the ids of a sample are
    adjacent in memory."""

    keys: tuple[str, ...]
    dense_ND: Tensor
    ids_FN: Tensor
    labels_N: Tensor
    users_N: Tensor | None = None
    """The user of each sample, also of users whose id in `ids_FN` is 0; None where samples have no user."""
    items_N: Tensor | None = None
    times_N: Tensor | None = None
    """None where samples have no time."""
    dense_names: tuple[str, ...] = ()
    """Names of the dense features, where they are known."""

    def __len__(self) -> int:
        return self.labels_N.shape[0]

    def select(self, rows_N: Tensor) -> Samples:
        """What a batch has of some samples, in this order."""
        rows_N = rows_N.to(self.labels_N.device)
        return Samples(
            keys=self.keys,
            dense_ND=self.dense_ND.index_select(0, rows_N),
            ids_FN=self.ids_FN.t().index_select(0, rows_N).t(),
            labels_N=self.labels_N.index_select(0, rows_N),
        )


def permutation(count: int, seed: int, epoch: int) -> Tensor:
    """The order of one epoch, a pure function of (count, seed, epoch)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % (1 << 63)
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed))


@dataclass(frozen=True, kw_only=True, eq=False)
class ShuffledOrder:
    """Every sample once per epoch, shuffled; the last batch may be smaller."""

    samples: Samples
    batch_size: int
    seed: int
    part: RankPart = WHOLE

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.samples) // self.batch_size)

    def share(self, part: RankPart) -> ShuffledOrder:
        """The same batches, of which only a part is made."""
        return replace(self, part=part)

    def whole_samples(self, number: int) -> int:
        """Samples of a batch of an epoch, those of all ranks together."""
        return min(self.batch_size, len(self.samples) - number * self.batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        """Yield the batches of an epoch, beginning with `start`."""
        order_N = permutation(len(self.samples), self.seed, epoch)
        if self.part == WHOLE:
            return cut(self.samples.select(order_N), self.batch_size, start)
        return cut_part(self.samples, self.batch_size, self.part, start, order_N)


def cut_part(
    samples: Samples, batch_size: int, part: RankPart, start: int = 0, order_N: Tensor | None = None
) -> Iterator[ClickBatch]:
    """A part of each of the batches that `cut` yields of samples in an order; nothing else is gathered."""
    rows_N = torch.from_numpy(part.rows(start * batch_size, len(samples), batch_size, len(samples)))
    own = samples.select(rows_N if order_N is None else order_N[rows_N])
    return cut(own, len(part.made(batch_size)))


def cut(samples: Samples, batch_size: int, start: int = 0) -> Iterator[ClickBatch]:
    """Yield consecutive batches. Full ones are views: the ids are arranged by batch once, not gathered every step."""
    features, full = len(samples.keys), len(samples) // batch_size
    blocks = samples.ids_FN[:, : full * batch_size].reshape(features, full, batch_size).transpose(0, 1).contiguous()
    offsets = torch.arange(features * batch_size + 1, device=samples.ids_FN.device)
    largest = largest_ids(samples.ids_FN) if samples.ids_FN.is_cpu and len(samples) else None

    def generate() -> Iterator[ClickBatch]:
        for index in range(start, full):
            begin, end = index * batch_size, (index + 1) * batch_size
            yield ClickBatch(
                samples.dense_ND[begin:end],
                JaggedFeatures(samples.keys, blocks[index].view(-1), offsets, True, largest_F=largest),
                samples.labels_N[begin:end],
            )
        if len(samples) % batch_size and start <= full:
            begin = full * batch_size
            yield ClickBatch(
                samples.dense_ND[begin:],
                JaggedFeatures.from_ids(samples.keys, samples.ids_FN[:, begin:]),
                samples.labels_N[begin:],
            )

    return generate()
