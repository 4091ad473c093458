"""A whole training step as one CUDA graph: the host queues one thing a step, and the device never waits for it.

A graph replays the same kernels on the same memory. What changes from step to step is therefore in memory: the batch
(drawn inside the graph, or copied into its place before), the learning rate, and the losses, a ring of the last ones.
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
"""Losses kept on the device: far more than are waiting to be read at any time."""
WARM_UP = 3


class Feed(Protocol):
    """Brings batches to one place."""

    batch: ClickBatch

    def bring(self, batches: Iterator[Any]) -> ClickBatch | None:
        """Before a replay: the next batch, or where to draw it. A batch that does not fill its place is given back."""

    def draw(self) -> None:
        """Inside the graph."""


@dataclass(frozen=True)
class Ticket:
    """Stands for a batch that is drawn where it is needed."""

    window: int
    samples: int

    def __len__(self) -> int:
        return self.samples


@dataclass(frozen=True)
class Tickets:
    """The order of made-up batches, without making them."""

    bags: RandomBags

    def __len__(self) -> int:
        return len(self.bags)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Ticket]:
        first = epoch * len(self)
        return (Ticket(first + step, self.bags.batch_size) for step in range(start, len(self)))


class DrawnFeed:
    """Batches drawn on the device inside the graph, which counts the windows itself."""

    def __init__(self, bags: RandomBags) -> None:
        self.bags, self.batch = bags, bags.buffers()
        self.window_1 = torch.zeros(1, dtype=torch.int64, device=self.batch.labels_B.device)
        self._next = 0

    def bring(self, batches: Iterator[Ticket]) -> None:
        window = next(batches).window
        if window != self._next:
            self.window_1.fill_(window)
        self._next = window + 1

    def draw(self) -> None:
        self.bags.draw(self.window_1, self.batch)
        self.window_1.add_(1)


class CopiedFeed:
    """Batches made on the host, copied into their place; from pinned memory without making the host wait."""

    def __init__(self, room: ClickBatch, *, pinned: bool) -> None:
        self.batch, self.pinned = room, pinned

    def bring(self, batches: Iterator[ClickBatch]) -> ClickBatch | None:
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
        """Nothing: the batch is there."""


class GraphStep:
    """Takes whole steps. Captured at the first, again where a clock is to be inside."""

    def __init__(self, model: DLRM, optimizer: Optimizer, feed: Feed) -> None:
        self.model, self.optimizer, self.feed = model, optimizer, feed
        device = feed.batch.labels_B.device
        self.rate_1 = torch.zeros(1, device=device)
        self.losses = torch.zeros(LOSSES, device=device)
        self.place_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._rate, self._taken = 0.0, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._clocked: tuple[torch.cuda.CUDAGraph, EventClock] | None = None

    def __call__(self, batches: Iterator[Any], rate: float) -> tuple[Tensor, int]:
        """One step: its loss, and how many samples it had."""
        if self._graph is None:
            self._graph = self._captured(None)
        with span("data"):
            odd = self.feed.bring(batches)
        with span("graph"):
            return self._replay(self._graph, rate) if odd is None else self._apart(odd, rate)

    def clocked(self, batches: Iterator[Any], rate: float) -> tuple[int, dict[str, int]]:
        """One step with a clock inside: its time and its parts, in ns, as the device lived through them."""
        if self._clocked is None:
            inside = EventClock(captured=True)
            self._clocked = (self._captured(inside), inside)
        graph, inside = self._clocked
        outside = EventClock()
        torch.cuda.synchronize()
        outside.begin()
        with span("data"):
            odd = self.feed.bring(batches)
        if odd is not None:
            self._apart(odd, rate)
            return outside.end()
        self._replay(graph, rate)
        wall, around = outside.end()
        whole, parts = inside.read()
        # What the replay needs beyond its own first and last event: the launch.
        parts["data"] = parts.get("data", 0) + around.get("data", 0)
        parts["other"] = parts.get("other", 0) + max(0, wall - whole - around.get("data", 0))
        return sum(parts.values()), parts

    def _apart(self, batch: ClickBatch, rate: float) -> tuple[Tensor, int]:
        """A step on a batch of another size than the graph's, as the last of a log may be."""
        loss = self.model.loss(batch)
        loss.backward()
        self.optimizer.step(torch.full_like(self.rate_1, rate))
        return loss.detach(), len(batch)

    def _replay(self, graph: torch.cuda.CUDAGraph, rate: float) -> tuple[Tensor, int]:
        if rate != self._rate:
            self.rate_1.fill_(rate)
            self._rate = rate
        graph.replay()
        place = self._taken % LOSSES
        self._taken += 1
        return self.losses[place], len(self.feed.batch)

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
        """The step as a graph. Steps at rate 0 come first, so that kernels are compiled and libraries have their
        memory; they leave no trace in weights, moments or counters."""
        counters = [counter for counter in (self.place_1, getattr(self.feed, "window_1", None)) if counter is not None]
        before = [counter.clone() for counter in counters]
        moments = copy.deepcopy(self.optimizer.state_dict())
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        self.rate_1.zero_()
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
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
