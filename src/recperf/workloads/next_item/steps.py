"""The batches of hstu as a step reads them: with the items that it looks up, or gathered inside a CUDA graph.

Batches for a graph, whose shapes do not change, are filled with sequences that do not count.

Shapes: B sequences of a batch, F sequences that fill it, R = B + F, T positions of all, N ids, K drawn items.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...data.batch import JaggedFeatures
from ...data.next_item_batches import SequenceBatch, SequenceOrder, WindowBatch
from ...models.init import generator
from ...models.next_item.config import NextItemConfig


@dataclass(frozen=True, eq=False)
class UsedItems:
    """Batches with the items whose rows a step updates: with the full softmax all, else those of the batch and those
    drawn for its loss, which follow from the seed and the step alone."""

    order: SequenceOrder
    model: NextItemConfig

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int = 0) -> Iterator[SequenceBatch]:
        for number, batch in enumerate(self.order.batches(epoch, start), epoch * len(self) + start):
            if self.model.full_softmax:
                every_N = torch.arange(self.model.items + 1, device=batch.items_T.device)
                yield replace(batch, features=JaggedFeatures.from_ids(("items",), every_N[None]))
                continue
            draw, shape = generator(self.order.seed, f"negatives.{number}"), (self.model.negatives,)
            drawn_K = torch.randint(1, self.model.items + 1, shape, generator=draw).to(batch.items_T.device)
            ids_N = torch.cat([batch.items_T, drawn_K, batch.targets_T])
            yield replace(batch, drawn_K=drawn_K, features=JaggedFeatures.from_ids(("items",), ids_N[None]))


DEVIATIONS = 3
"""Standard deviations of a batch's positions above their mean that a graph has room for: about one batch in 700 is
larger, and is trained on without the graph."""
MULTIPLE = 128
"""The positions of a padded batch are a multiple of this."""


@dataclass(frozen=True)
class WindowOrder:
    """The batches of an order, without gathering them."""

    order: SequenceOrder

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int = 0) -> Iterator[WindowBatch]:
        return self.order.windows(epoch, start)


class WindowFeed:
    """Batches that the graph gathers from the events on the device. After the sequences of a batch come copies of the
    longest one up to a fixed number of positions; their weight in the loss is 0."""

    counters: tuple[Tensor, ...] = ()

    def __init__(self, order: SequenceOrder) -> None:
        self.events, lengths_S = order.events, order.lengths_S.double()
        self.samples, self.longest = min(order.batch_size, len(lengths_S)), int(lengths_S.max())
        deviation = math.sqrt(self.samples) * float(lengths_S.std(correction=0))
        positions = self.samples * float(lengths_S.mean()) + DEVIATIONS * deviation
        self.positions = MULTIPLE * math.ceil(min(positions, self.samples * self.longest) / MULTIPLE)
        self._filler = order.begins_S[lengths_S.argmax()]
        self._filled_F = torch.arange(1, math.ceil(self.positions / self.longest) + 1) * self.longest
        """Positions up to the end of each sequence that fills the batch."""
        self.numbers_T = torch.arange(self.positions, device=self.events.device)
        # The warm-up before a capture trains on the first position of some sequences.
        begins_B = order.begins_S[: self.samples]
        self.packed = self._packed(begins_B, torch.ones_like(begins_B)).to(self.events.device)
        self.batch = self._gathered()

    def load(self, batches: Iterator[WindowBatch]) -> SequenceBatch | None:
        batch = next(batches)
        if len(batch) != self.samples or int(batch.lengths_B.sum()) > self.positions:
            return batch.gathered()
        self.packed.copy_(self._packed(batch.begins_B, batch.lengths_B), non_blocking=True)
        return None

    def draw(self) -> None:
        self.batch = self._gathered()

    def _packed(self, begins_B: Tensor, lengths_B: Tensor) -> Tensor:
        """The offsets and shifts of all rows. The memory is new each time, as an earlier copy may be under way."""
        rows = len(begins_B) + len(self._filled_F)
        packed = torch.zeros(2 * rows + 1, dtype=torch.int64, pin_memory=self.events.device.type == "cuda")
        offsets_R1, shifts_R = packed[: rows + 1], packed[rows + 1 :]
        torch.cumsum(lengths_B, 0, out=offsets_R1[1 : self.samples + 1])
        offsets_R1[self.samples + 1 :] = (self._filled_F + offsets_R1[self.samples]).clamp_(max=self.positions)
        shifts_R[: self.samples] = begins_B
        shifts_R[self.samples :] = self._filler
        shifts_R -= offsets_R1[:-1]
        return packed

    def _gathered(self) -> SequenceBatch:
        batch = self.events.gathered(self.packed, self.numbers_T, self.longest)
        counted = batch.offsets_B1[self.samples]
        return replace(batch, samples=self.samples, weights_T=(self.numbers_T < counted) / counted)
