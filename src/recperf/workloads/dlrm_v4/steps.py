"""The batches of dlrm-v4 as its model reads them, prepared where they are used or packed for a CUDA graph, and a step:
its learning rate, its loss with the metrics of what it predicts, and its update."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...data.batch import HistoryBatch
from ...data.streaming.history import Histories
from ...data.streaming.loader import StreamOrder, load
from ...distributed.ranks import current
from ...measure.spans import span
from ...models.dlrm_v4.config import DLRMv4Config
from ...models.dlrm_v4.inputs import Inputs, prepare
from ...models.dlrm_v4.model import DLRMv4
from ...models.dlrm_v4.padding import Padding
from ...models.dlrm_v4.stages import StagedLoss
from ...models.tiers.cache import TieredRows
from ...stop import reached
from ...train.feeds import prefetched
from ...train.metrics import Tally
from ...train.optim import AdamW, norm_of
from .config import HistoryTrainConfig

T = TypeVar("T")


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

    def loader(self, start: int = 0) -> Generator[HistoryBatch, None, None]:
        return load(self.order, self.histories.batch, workers=self.workers, start=start, device=self.device)

    def inputs(self, batch: HistoryBatch) -> Inputs:
        return prepare(batch.to(self.device), self.model)

    def parts(self, batch: HistoryBatch) -> list[NDArray[np.int64]]:
        """The positions of each rank's samples in a batch: there is one rank."""
        return [np.arange(len(batch))]

    def loaded(self, epoch: int, start: int = 0) -> Iterator[HistoryBatch]:
        return self.entered(self.loader(start), start)

    def entered(self, loader: Generator[T, None, None], start: int) -> Iterator[T]:
        """Batches from one on, each window entered as its first one is made."""
        with closing(loader):
            for number, batch in enumerate(loader, start):
                if number in self.firsts:
                    reached("window: entered")
                yield batch

    def batches(self, epoch: int, start: int = 0) -> Iterator[Numbered]:
        with closing(self._prepared(self.loaded(epoch, start))) as prepared:  # type: ignore[type-var]
            for step, inputs in enumerate(prepared, epoch * len(self) + start):
                yield Numbered(inputs, step)

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
class PackedOrder(InputOrder):
    """The same batches for a graph, packed by the threads that gather them."""

    padding: Padding

    def batches(self, epoch: int, start: int = 0) -> Iterator[PackedBatch | Numbered]:  # type: ignore[override]
        def packed(positions_B: NDArray[np.int64]) -> PackedBatch | HistoryBatch:
            """One of another size than the graph's stays as it is."""
            batch = self.histories.batch(positions_B)
            if len(batch) != self.padding.samples:
                return batch
            return PackedBatch(batch, self.padding.packed(batch, pinned=self.device.type == "cuda"))

        loader = load(self.order, packed, workers=self.workers, start=start)
        for number, batch in enumerate(self.entered(loader, start), epoch * len(self) + start):
            yield Numbered(self.inputs(batch), number) if isinstance(batch, HistoryBatch) else batch


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


def learning_rate(train: HistoryTrainConfig, step: int, rise: int, steps: int) -> float:
    """Adam's rate at a step. The first step runs at 0, as the benchmark's does."""
    rate = train.learning_rate * min(1.0, step / rise)
    if train.final_rate == 1 or step <= rise:
        return rate
    return rate * (1 - (1 - train.final_rate) * (step - rise) / max(1, steps - rise))


class SteppedModel:
    """The model as the training loop knows models. What it predicts of batches it learns from is counted."""

    def __init__(self, model: DLRMv4, seed: int, device: torch.device) -> None:
        self.model, self.seed = model, seed
        self.lifetime, self.recent = Tally(device=device), Tally(device=device)
        """Counts of predictions: of all steps, and of the steps since `seen` was last called."""

    def train(self, mode: bool = True) -> SteppedModel:
        self.model.train(mode)
        return self

    def loss(self, batch: Numbered) -> StagedLoss:
        self.model.set_step(self.seed, batch.step)
        loss = self.model.loss(batch.inputs)
        if batch.counted:
            with span("metrics"):
                self.recent.add(loss.logits_B, batch.inputs.labels_B)
        return loss

    def forget_gradients(self) -> None:
        self.model.forget_gradients()

    def seen(self) -> dict[str, float] | None:
        """Of all ranks; the lifetime tally is theirs together too."""
        recent = current().merge_tally(self.recent)
        metrics = recent.metrics()
        if metrics is None:
            return None
        self.lifetime.merge(recent)
        self.recent.clear()
        return {**metrics, "lifetime_auc": self.lifetime.auc()}


class AdamAndRows:
    """Adam of the dense parameters, their gradient clipped, and that of the tables for the rows a step used."""

    def __init__(self, model: DLRMv4, config: HistoryTrainConfig) -> None:
        self.model, self.config = model, config
        # Not torch's class: creating the first one imports torch's compiler, which delays every start by a second.
        self.adam = AdamW([(model.dense_parameters(), config.weight_decay)], betas=(0.95, 0.999))

    def step(self, learning_rate: float | Tensor) -> None:
        """A rate on a GPU is read there, as a CUDA graph needs it."""
        rate = learning_rate
        if not isinstance(rate, Tensor) or not rate.is_cuda:
            rate = float(rate)
        with span("dense_update"):
            if self.config.clip:
                nn.utils.clip_grad_norm_(self.model.dense_parameters(), self.config.clip)
            self.adam.step(rate)
        with span("sparse_update"):
            self.model.tables.update(rate * (self.config.table_learning_rate / self.config.learning_rate))

    def gradient_norm(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.model.dense_parameters()]
        return norm_of([gradient for gradient in gradients if gradient is not None])

    def state_dict(self) -> dict[str, Any]:
        """Adam's: that of the rows is part of the tables."""
        return self.adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies into the state that is there: a graph holds its addresses."""
        self.adam.load_state_dict(state)
