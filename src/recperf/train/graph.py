"""A whole training step as one CUDA graph: the host launches once for each step, so that the device never waits.

A graph replays the same kernels on the same memory. What changes from step to step is therefore read from memory: the
batch (drawn inside the graph, or copied before the replay), the learning rate, and a ring buffer of the last losses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..data.batch import ClickBatch
from ..data.random_bags import RandomBags
from ..measure.device_clock import EventClock
from ..measure.spans import span
from ..models.dlrm import DLRM
from .loop import Optimizer

LOSSES = 4096
"""Size of the ring buffer: far more losses than wait to be logged at any time."""
WARM_UP = 3


class Feed(Protocol):
    """Puts each batch into the memory that the graph reads."""

    batch: ClickBatch

    def load(self, batches: Iterator[Any]) -> ClickBatch | None:
        """Before a replay: copy the next batch, or say which one to draw. Returns a batch of another size."""

    def draw(self) -> None:
        """Draw the batch, inside the graph."""


@dataclass(frozen=True)
class DrawnBatch:
    """The number of a synthetic batch that the graph draws on the device."""

    window: int
    samples: int

    def __len__(self) -> int:
        return self.samples


@dataclass(frozen=True)
class DrawnOrder:
    """The order of synthetic batches, without drawing them."""

    bags: RandomBags

    def __len__(self) -> int:
        return len(self.bags)

    def batches(self, epoch: int, start: int = 0) -> Iterator[DrawnBatch]:
        first = epoch * len(self)
        return (DrawnBatch(first + step, self.bags.batch_size) for step in range(start, len(self)))


class DrawnFeed:
    """Batches that the graph draws on the device; it counts their numbers itself."""

    def __init__(self, bags: RandomBags) -> None:
        self.bags, self.batch = bags, bags.buffers()
        self.window_1 = torch.zeros(1, dtype=torch.int64, device=self.batch.labels_B.device)
        self._next = 0

    def load(self, batches: Iterator[DrawnBatch]) -> None:
        window = next(batches).window
        if window != self._next:
            self.window_1.fill_(window)
        self._next = window + 1

    def draw(self) -> None:
        self.bags.draw(self.window_1, self.batch)
        self.window_1.add_(1)


class CopiedFeed:
    """Batches from the host, copied to the device; from pinned memory without blocking the host."""

    def __init__(self, batch: ClickBatch, *, pinned: bool) -> None:
        self.batch, self.pinned = batch, pinned

    def load(self, batches: Iterator[ClickBatch]) -> ClickBatch | None:
        batch = next(batches)
        batch = batch.pin_memory() if self.pinned else batch
        if len(batch) != len(self.batch):
            return batch.to(self.batch.labels_B.device, non_blocking=self.pinned)
        ours, theirs = self.batch, batch
        ids = theirs.features.values_V
        ours.dense_BD.copy_(theirs.dense_BD, non_blocking=self.pinned)
        ours.labels_B.copy_(theirs.labels_B, non_blocking=self.pinned)
        ours.features.offsets_FB1.copy_(theirs.features.offsets_FB1, non_blocking=self.pinned)
        ours.features.values_V[: ids.numel()].copy_(ids, non_blocking=self.pinned)
        return None

    def draw(self) -> None:
        """Does nothing: the batch was copied."""


class GraphStep:
    """Executes whole steps. The graph is captured at the first step, and once more with a clock inside."""

    def __init__(self, model: DLRM, optimizer: Optimizer, feed: Feed) -> None:
        self.model, self.optimizer, self.feed = model, optimizer, feed
        device = feed.batch.labels_B.device
        self.rate_1 = torch.zeros(1, device=device)
        self.losses = torch.zeros(LOSSES, device=device)
        self.place_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._rate, self._steps = 0.0, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._clocked: tuple[torch.cuda.CUDAGraph, EventClock] | None = None

    def __call__(self, batches: Iterator[Any], rate: float) -> tuple[Tensor, int]:
        """One step: returns its loss and its number of samples."""
        if self._graph is None:
            self._graph = self._captured(None)
        with span("data"):
            uneven = self.feed.load(batches)
        with span("graph"):
            return self._replay(self._graph, rate) if uneven is None else self._without_graph(uneven, rate)

    def clocked(self, batches: Iterator[Any], rate: float) -> tuple[int, dict[str, int]]:
        """One step with a clock inside: its time and the times of its parts on the device, in ns."""
        if self._clocked is None:
            inside = EventClock(captured=True)
            self._clocked = (self._captured(inside), inside)
        graph, inside = self._clocked
        outside = EventClock()
        torch.cuda.synchronize()
        outside.begin()
        with span("data"):
            uneven = self.feed.load(batches)
        if uneven is not None:
            self._without_graph(uneven, rate)
            return outside.end()
        self._replay(graph, rate)
        wall, around = outside.end()
        whole, parts = inside.read()
        # The replay takes longer than the time between its first and last event: the launch.
        parts["data"] = parts.get("data", 0) + around.get("data", 0)
        parts["other"] = parts.get("other", 0) + max(0, wall - whole - around.get("data", 0))
        return sum(parts.values()), parts

    def eager(self, batches: Iterator[Any], rate: float) -> None:
        """One step whose kernels are launched one by one, as they are before a graph is captured."""
        with span("data"):
            uneven = self.feed.load(batches)
        if uneven is not None:
            self._without_graph(uneven, rate)
            return
        self._set_rate(rate)
        self._step()

    def _without_graph(self, batch: ClickBatch, rate: float) -> tuple[Tensor, int]:
        """A step on a batch of another size than the graph's, as the last one of a file may be."""
        loss = self.model.loss(batch)
        loss.backward()
        self.optimizer.step(torch.full_like(self.rate_1, rate))
        return loss.detach(), len(batch)

    def _replay(self, graph: torch.cuda.CUDAGraph, rate: float) -> tuple[Tensor, int]:
        self._set_rate(rate)
        graph.replay()
        place = self._steps % LOSSES
        self._steps += 1
        return self.losses[place], len(self.feed.batch)

    def _set_rate(self, rate: float) -> None:
        if rate != self._rate:
            self.rate_1.fill_(rate)
            self._rate = rate

    def _step(self) -> None:
        with span("data"):
            self.feed.draw()
        loss = self.model.loss(self.feed.batch)
        loss.backward()
        with span("update"):
            self.optimizer.step(self.rate_1)
        with span("loss"):
            self.losses.index_copy_(0, self.place_1, loss.detach().view(1))
            self.place_1.add_(1).remainder_(LOSSES)

    def _captured(self, clock: EventClock | None) -> torch.cuda.CUDAGraph:
        """Capture the step as a graph. Warm-up steps at learning rate 0 come first, in which kernels are compiled and
        libraries allocate memory; weights, moments and counters are as before afterwards."""
        counters = [counter for counter in (self.place_1, getattr(self.feed, "window_1", None)) if counter is not None]
        before = [counter.clone() for counter in counters]
        moments = copy.deepcopy(self.optimizer.state_dict())
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        self.rate_1.zero_()
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.load_state_dict(moments)
        for counter, value in zip(counters, before):
            counter.copy_(value)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            if clock:
                clock.begin()
            self._step()
            if clock:
                clock.close()
        self.rate_1.fill_(self._rate)
        return graph
