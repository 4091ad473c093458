"""Batches of samples in memory or of stored click rows, in an order that is a pure function of (seed, epoch, position).

A stored log may be larger than memory, so its rows are not shuffled individually: blocks of adjacent rows are, and then
the rows of a group of blocks. A read is as long as a block, memory is limited to groups, and an epoch has every row
once.

Shapes: N samples, B samples a batch, F sparse features, D dense features, S slots of ids (one for each id a row can
have).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..ops.hashing import hash_int
from .batch import ClickBatch, JaggedFeatures, Tensors, largest_ids
from .tables import EMPTY, Rows, Split, SplitRows

BLOCK_ROWS = 4096
GROUP_BLOCKS = 64
SIZES = 16
"""Sizes of batches whose offsets are held."""
"""64 blocks of 4,096 rows of Criteo are 39 MiB; at most three groups are in memory: the current one, and the next
twice."""


@dataclass(frozen=True)
class RankShare:
    """The samples of every batch that one of several ranks makes: rank, rank + ranks, rank + 2 ranks and so on."""

    rank: int = 0
    ranks: int = 1

    def own(self, samples: int) -> range:
        """Their positions in a batch of this many samples."""
        return range(self.rank, samples, self.ranks)

    def made(self, samples: int) -> range:
        """The same, but the first sample where there is none: a rank never makes an empty batch."""
        return self.own(samples) or range(1)

    def rows(self, first: int, last: int, batch_size: int, end: int) -> NDArray[np.int64]:
        """Which rows of first .. last - 1 are made, of consecutive batches that end with row `end`."""
        rows_N = np.arange(first, last)
        position_N = rows_N % batch_size
        samples_N = np.minimum(batch_size, end - (rows_N - position_N))
        instead_N = (self.rank >= samples_N) & (position_N == 0)
        made_N: NDArray[np.int64] = rows_N[(position_N % self.ranks == self.rank) | instead_N]
        return made_N


WHOLE = RankShare()


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples(Tensors):
    """A whole split as tensors, one id per feature and sample. Shuffling is fastest if the ids of a sample are
    adjacent in memory."""

    keys: tuple[str, ...]
    dense_ND: Tensor
    ids_FN: Tensor
    labels_N: Tensor

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
    rank_share: RankShare = WHOLE

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.samples) // self.batch_size)

    def share(self, rank_share: RankShare) -> ShuffledOrder:
        """The same batches, of which only this share is made."""
        return replace(self, rank_share=rank_share)

    def whole_samples(self, number: int) -> int:
        """Samples of a batch of an epoch, those of all ranks together."""
        return min(self.batch_size, len(self.samples) - number * self.batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        """Yield the batches of an epoch, beginning with `start`."""
        order_N = permutation(len(self.samples), self.seed, epoch)
        if self.rank_share == WHOLE:
            return cut(self.samples.select(order_N), self.batch_size, start)
        return cut_share(self.samples, self.batch_size, self.rank_share, start, order_N)


def cut_share(
    samples: Samples, batch_size: int, rank_share: RankShare, start: int = 0, order_N: Tensor | None = None
) -> Iterator[ClickBatch]:
    """One share of each of the batches that `cut` yields of samples in an order; nothing else is gathered."""
    rows_N = torch.from_numpy(rank_share.rows(start * batch_size, len(samples), batch_size, len(samples)))
    own = samples.select(rows_N if order_N is None else order_N[rows_N])
    return cut(own, len(rank_share.made(batch_size)))


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


@dataclass(frozen=True, kw_only=True, eq=False)
class ClickOrder:
    """Every row of a split once per epoch, shuffled by blocks; the last batch may be smaller."""

    store: SplitRows
    batch_size: int
    seed: int
    split: Split = "train"
    block_rows: int = BLOCK_ROWS
    group_blocks: int = GROUP_BLOCKS
    rank_share: RankShare = WHOLE
    """The samples of each batch that are read; the order of all of them is the same whatever the share is."""
    _offsets: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def rows(self) -> int:
        return self.store.count(self.split)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self.rows // self.batch_size)

    def share(self, rank_share: RankShare) -> ClickOrder:
        """The same batches, of which only this share is read."""
        return replace(self, rank_share=rank_share)

    def whole_samples(self, number: int) -> int:
        """Samples of a batch of an epoch, those of all ranks together."""
        return min(self.batch_size, self.rows - number * self.batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        """The batches of an epoch from the given one on, shuffled."""
        order_K = permutation(-(-self.rows // self.block_rows), self.seed, epoch).numpy()
        groups = [order_K[at : at + self.group_blocks] for at in range(0, len(order_K), self.group_blocks)]
        lengths = [int(self._lengths(blocks).sum()) for blocks in groups]
        ends, begin = np.cumsum(lengths), start * self.batch_size
        first = int(np.searchsorted(ends, begin, side="right"))

        def shuffled(index: int) -> Rows:
            mixed = hash_int(index, self.seed) >> 11
            order_N = permutation(lengths[index], mixed, epoch).numpy()
            before = int(ends[index]) - lengths[index]
            if self.rank_share == WHOLE:
                return self._gather(groups[index]).take(order_N[max(0, begin - before) :])
            own_N = self.rank_share.rows(max(begin, before), int(ends[index]), self.batch_size, self.rows) - before
            return self.store.take(self.split, self._positions(groups[index])[order_N[own_N]])

        return self._cut(_ahead(shuffled, range(first, len(groups))))

    def cut(self, start: int = 0) -> Iterator[ClickBatch]:
        """The batches of the split in the order of the log, from the given one on."""
        end = self.rows
        # Groups of whole batches, so that no batch spans two groups.
        group = self.batch_size * max(1, self.block_rows * self.group_blocks // self.batch_size)
        firsts = range(start * self.batch_size, end, group)

        def straight(first: int) -> Rows:
            last = min(end, first + group)
            if self.rank_share == WHOLE:
                return self.store.rows_of(self.split, first, last)
            return self.store.take(self.split, self.rank_share.rows(first, last, self.batch_size, end))

        return self._cut(_ahead(straight, firsts))

    def _lengths(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(self.rows - blocks * self.block_rows, self.block_rows)

    def _positions(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of some blocks, by their position in the split."""
        lengths = self._lengths(blocks)
        within_N = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.asarray(np.repeat(blocks * self.block_rows, lengths) + within_N)

    def _gather(self, blocks: NDArray[np.int64]) -> Rows:
        ends = np.minimum((blocks + 1) * self.block_rows, self.rows)
        read = [self.store.rows_of(self.split, int(b) * self.block_rows, int(end)) for b, end in zip(blocks, ends)]
        columns = zip(*((rows.dense_ND, rows.ids_NS, rows.labels_N) for rows in read))
        return Rows(*(np.concatenate(column) for column in columns))

    def _cut(self, groups: Iterator[Rows]) -> Iterator[ClickBatch]:
        """Batches of the rows of consecutive groups; a batch may span two groups."""
        begun: list[tuple[Tensor, Tensor, Tensor]] = []
        # Only the last batch may have fewer, and it ends with the rows.
        size = missing = len(self.rank_share.made(self.batch_size))
        for rows in groups:
            dense_ND, ids_NS, labels_N = map(torch.from_numpy, (rows.dense_ND, rows.ids_NS, rows.labels_N))
            at = 0
            while at < len(rows):
                here = slice(at, at + missing)
                begun.append((dense_ND[here], ids_NS[here], labels_N[here]))
                rows_here = len(begun[-1][2])
                at, missing = at + rows_here, missing - rows_here
                if not missing:
                    yield self._batch(begun)
                    begun, missing = [], size
        if begun:
            yield self._batch(begun)

    def _batch(self, pieces: list[tuple[Tensor, Tensor, Tensor]]) -> ClickBatch:
        dense_BD, ids_BS, labels_B = pieces[0] if len(pieces) == 1 else (torch.cat(parts) for parts in zip(*pieces))
        return ClickBatch(dense_BD, self._features(ids_BS), labels_B.float())

    def _features(self, ids_BS: Tensor) -> JaggedFeatures:
        keys, slots = self.store.keys, self.store.slots
        if max(slots) == 1:
            values_V = ids_BS.t().to(torch.int64, memory_format=torch.contiguous_format).reshape(-1)
            return JaggedFeatures(keys, values_V, self._offsets_of(values_V.numel()), True)
        bags = torch.split(ids_BS, list(slots), dim=1)
        lengths = [(ids_BL != EMPTY).sum(1) for ids_BL in bags]
        values_V = torch.cat([ids_BL[ids_BL != EMPTY] for ids_BL in bags]).to(torch.int64)
        return JaggedFeatures(keys, values_V, nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0)))

    def _offsets_of(self, ids: int) -> Tensor:
        if ids not in self._offsets:
            # Batches have one size, but for the last of an epoch.
            if len(self._offsets) >= SIZES:
                self._offsets.clear()
            self._offsets[ids] = torch.arange(ids + 1)
        return self._offsets[ids]


def _ahead(make: Callable[[int], Rows], keys: range) -> Iterator[Rows]:
    """The group of each key in turn; a thread reads and shuffles the next one while this one is used."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="recperf-clicks")
    try:
        reading = pool.submit(make, keys[0]) if keys else None
        for key in keys[1:]:
            assert reading is not None
            ready = reading.result()
            reading = pool.submit(make, key)
            yield ready
            del ready
        if reading is not None:
            yield reading.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
