"""Batches of in-memory samples, in an order that is a pure function of (seed, epoch).

Shapes: N samples, B samples a batch, F sparse features, D dense features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import ClickBatch, JaggedFeatures, Tensors, largest_ids


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

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.samples) // self.batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        """Yield the batches of an epoch, beginning with `start`."""
        order = permutation(len(self.samples), self.seed, epoch).to(self.samples.labels_N.device)
        shuffled = Samples(
            keys=self.samples.keys,
            dense_ND=self.samples.dense_ND.index_select(0, order),
            ids_FN=self.samples.ids_FN.t().index_select(0, order).t(),
            labels_N=self.samples.labels_N.index_select(0, order),
        )
        return cut(shuffled, self.batch_size, start)


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
