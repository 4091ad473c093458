"""The batches of dlrm-v4 as its model reads them: prepared where they are used, or packed for a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.batch import HistoryBatch
from ...data.yambda.history import Histories
from ...data.yambda.loader import Loader, StreamOrder
from ...models.dlrm_v4.config import DLRMv4Config
from ...models.dlrm_v4.inputs import Inputs, prepare
from ...models.dlrm_v4.padding import Padding
from ...models.tiers.cache import TieredRows
from ...points import reached
from ...train.feeds import prefetched


@dataclass(frozen=True, eq=False)
class Numbered:
    """What the model reads, and the step it belongs to, which decides what dropout drops."""

    inputs: Inputs
    step: int
    counted: bool = True
    """Whether predictions of it count; not those of a sample that stands in where a rank has none."""

    def __len__(self) -> int:
        return len(self.inputs)

    def record_stream(self, stream: Any) -> None:
        self.inputs.record_stream(stream)


@dataclass(frozen=True, eq=False)
class InputOrder:
    """Batches as the model reads them, window after window, the same in every epoch."""

    order: StreamOrder
    histories: Histories
    model: DLRMv4Config
    device: torch.device
    workers: int
    tiers: TieredRows | None = field(default=None, kw_only=True)
    """Where batches to train on are placed, if the tables lie in tiers."""

    def __len__(self) -> int:
        return len(self.order)

    def loader(self, start: int = 0) -> Loader[HistoryBatch]:
        return Loader(self.order, self.histories.batch, workers=self.workers, start=start, device=self.device)

    def inputs(self, batch: HistoryBatch) -> Inputs:
        return prepare(batch.to(self.device), self.model)

    def parts(self, batch: HistoryBatch) -> list[NDArray[np.int64]]:
        """The positions of each rank's samples in a batch: there is one rank."""
        return [np.arange(len(batch))]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Numbered]:
        with self.loader(start) as loader:
            for number, inputs in enumerate(self._prepared(loader), start):
                if number in self.firsts:
                    reached("window: entered")
                yield Numbered(inputs, epoch * len(self) + number)

    def _prepared(self, batches: Iterator[HistoryBatch]) -> Iterator[Inputs]:
        tiers = self.tiers
        if tiers is None:
            return prefetched(batches, self.inputs, self.device)
        owner = object()

        def placed(batch: HistoryBatch) -> Inputs:
            inputs = self.inputs(batch)
            placed = tiers.place(inputs.rows, owner)
            return replace(inputs, slots=placed.slots, placed=placed)

        def finish(inputs: Inputs) -> None:
            assert inputs.placed is not None
            tiers.finish(inputs.placed)

        return prefetched(batches, placed, self.device, depth=tiers.config.depth, finished=finish, waited=tiers.waited)

    @cached_property
    def firsts(self) -> frozenset[int]:
        """The batches after a seam."""
        return frozenset(self.order.seams_S.tolist())


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A batch, and the same padded to the shapes of a graph and packed."""

    history: HistoryBatch
    buffer: Tensor

    def __len__(self) -> int:
        return len(self.history)


@dataclass(frozen=True, eq=False)
class PackedHistories:
    """Makes packed batches; one of another size than the graph's stays as it is."""

    histories: Histories
    padding: Padding
    pinned: bool

    def batch(self, positions_B: NDArray[np.int64]) -> PackedBatch | HistoryBatch:
        batch = self.histories.batch(positions_B)
        if len(batch) != self.padding.samples:
            return batch
        return PackedBatch(batch, self.padding.packed(batch, pinned=self.pinned))


@dataclass(frozen=True, eq=False)
class PackedOrder(InputOrder):
    """The same batches for a graph, packed by the threads that gather them."""

    padding: Padding

    def batches(self, epoch: int, start: int = 0) -> Iterator[PackedBatch | Numbered]:  # type: ignore[override]
        packed = PackedHistories(self.histories, self.padding, pinned=self.device.type == "cuda")
        with Loader(self.order, packed.batch, workers=self.workers, start=start) as loader:
            for number, batch in enumerate(loader, start):
                if number in self.firsts:
                    reached("window: entered")
                if isinstance(batch, HistoryBatch):
                    yield Numbered(self.inputs(batch), epoch * len(self) + number)
                else:
                    yield batch


class PackedFeed:
    """Copies packed batches to the memory that the graph reads."""

    counters: tuple[Tensor, ...] = ()

    def __init__(self, padding: Padding, device: torch.device) -> None:
        self.buffer = padding.empty().to(device)
        self.batch = Numbered(padding.unpacked(self.buffer), 0)

    def load(self, batches: Iterator[PackedBatch | Numbered]) -> Numbered | None:
        batch = next(batches)
        if isinstance(batch, Numbered):
            return batch
        self.buffer.copy_(batch.buffer, non_blocking=True)
        return None

    def draw(self) -> None:
        """Does nothing: the batch was copied."""
