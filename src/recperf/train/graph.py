"""A whole training step as one CUDA graph: the host launches once for each step, so that the device never waits.

A graph replays the same kernels on the same memory. What changes from step to step is therefore read from memory: the
batch (drawn or gathered inside the graph, or copied before the replay), the learning rate, and a ring buffer of the
last losses. A step that cannot be captured is taken without a graph, and the run's settings say why, unless a graph was
requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import MachineError
from ..machine import out_of_memory
from ..measure.clocks import EventClock
from ..measure.spans import listen, span
from ..models.streams import FIRST, SideStreams
from .feeds import DrawnFeed, Feed
from .loop import Model, Optimizer, RecordNorm
from .optim import SplitOptimizer

LOSSES = 4096
"""Size of the ring buffer: far more losses than wait to be logged at any time."""
WARM_UP = 3


class GraphModel(Model, Protocol):
    def forget_gradients(self) -> None:
        """Drop the gradients of a step that was not finished."""


class GraphStep:
    """Executes whole steps. The graph is captured at the first step, once more with the norm of the gradient at the
    first step whose norm is logged, and once more with a clock inside; all use the same memory.

    `state` lists what a step changes even at learning rate 0, beside the optimizer's own state. `reasons` are the
    settings of the run; a capture that fails is stated there, and steps are then taken without a graph. If the user
    requested a graph, it is an error that names the switch in `requested_by`. `streams` are those of the model.
    """

    def __init__(
        self,
        model: GraphModel,
        optimizer: Optimizer,
        feed: Feed,
        *,
        device: torch.device,
        reasons: dict[str, str],
        requested_by: str | None,
        state: Callable[[], list[Tensor]] = list,
        streams: SideStreams | None = None,
    ) -> None:
        self.requested_by, self.streams = requested_by, streams or SideStreams()
        self.model, self.optimizer, self.feed, self.state, self.reasons = model, optimizer, feed, state, reasons
        self.rate_1 = torch.zeros(1, device=device)
        self.losses = torch.zeros(LOSSES, device=device)
        self.place_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.norm_1 = torch.zeros(1, device=device)
        self._rate, self._steps = 0.0, 0
        self._graphs: dict[bool, torch.cuda.CUDAGraph | None] = {}
        """The graph without the gradient's norm and the one with it."""
        self._pool: Any = None
        """Memory of the graphs; what lasts from replay to replay lies outside of it."""
        self._clocked: tuple[torch.cuda.CUDAGraph, EventClock] | None = None
        self.failed = False
        """Whether a capture failed."""

    def __call__(
        self, batches: Iterator[Any], rate: float, record_norm: RecordNorm | None = None
    ) -> tuple[Tensor, int]:
        """One step: returns its loss and its number of samples."""
        norm = record_norm is not None
        if norm not in self._graphs and not self.failed:
            self._graphs[norm] = self._captured(None, norm=norm)
        graph = self._graphs.get(norm)
        if graph is None:
            return self.eager(batches, rate, record_norm)
        with span("data"):
            uneven = self.feed.load(batches)
        with span("graph"):
            if uneven is not None:
                return self._without_graph(uneven, rate, record_norm)
            taken = self._replay(graph, rate)
            if record_norm:
                record_norm(self.norm_1[0].clone())
            return taken

    def clocked(self, batches: Iterator[Any], rate: float) -> tuple[int, dict[str, int]]:
        """One step with a clock inside: its time and the times of its parts on the device, in ns."""
        if self._clocked is None and not self.failed:
            inside = EventClock(captured=True)
            graph = self._captured(inside)
            self._clocked = None if graph is None else (graph, inside)
        outside = EventClock()
        torch.cuda.synchronize()
        outside.begin()
        if self._clocked is None:
            self.eager(batches, rate)
            return outside.end()
        graph, inside = self._clocked
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

    def eager(self, batches: Iterator[Any], rate: float, record_norm: RecordNorm | None = None) -> tuple[Tensor, int]:
        """One step whose kernels are launched one by one, as they are before a graph is captured."""
        with span("data"):
            uneven = self.feed.load(batches)
        if uneven is not None:
            return self._without_graph(uneven, rate, record_norm)
        self._set_rate(rate)
        self._step(norm=record_norm is not None)
        if record_norm:
            record_norm(self.norm_1[0].clone())
        return self._taken()

    def _without_graph(self, batch: Any, rate: float, record_norm: RecordNorm | None = None) -> tuple[Tensor, int]:
        """A step on a batch of another size than the graph's, as the last one of a file may be."""
        # Before the backward pass: on a stream of its own the tables' update waits for nothing that is launched later.
        rate_1 = torch.full_like(self.rate_1, rate)
        loss = self.model.loss(batch)
        loss.backward()
        if record_norm:
            record_norm(self.optimizer.gradient_norm())
        self.optimizer.step(rate_1)
        return loss.detach(), len(batch)

    def _replay(self, graph: torch.cuda.CUDAGraph, rate: float) -> tuple[Tensor, int]:
        self._set_rate(rate)
        graph.replay()
        return self._taken()

    def _taken(self) -> tuple[Tensor, int]:
        """The loss and the samples of the step that was taken last."""
        place = self._steps % LOSSES
        self._steps += 1
        return self.losses[place], len(self.feed.batch)

    def _set_rate(self, rate: float) -> None:
        if rate != self._rate:
            self.rate_1.fill_(rate)
            self._rate = rate

    def _step(self, *, norm: bool = False) -> None:
        with span("data"):
            self.feed.draw()
        loss = self.model.loss(self.feed.batch)
        if isinstance(self.feed, DrawnFeed):
            with span("data"):
                self.feed.draw_next()
        with span("loss"), self.streams.run_after_all("losses"):
            self.losses.index_copy_(0, self.place_1, loss.detach().view(1))
            self.place_1.add_(1).remainder_(LOSSES)
        loss.backward()
        with span("update"):
            if norm:
                self.norm_1.copy_(self.optimizer.gradient_norm())
            self.optimizer.step(self.rate_1)
        self.streams.join_all()

    def _captured(self, clock: EventClock | None, *, norm: bool = False) -> torch.cuda.CUDAGraph | None:
        """Capture the step as a graph, after a warm-up; none where that fails."""
        listener = listen(None)  # A clock around the step must not record its events in the graph.
        try:
            self._warm_up(norm=norm)
            graph = self._record(clock, norm=norm)
        finally:
            listen(listener)
        self.rate_1.fill_(self._rate)
        return graph

    def _warm_up(self, *, norm: bool) -> None:
        """Take steps at learning rate 0, in which kernels are compiled and libraries allocate memory; weights, moments,
        counters and torch's generator are as before afterwards."""
        changed = [self.place_1, *self.feed.counters, *self.state(), *tensors_in(self.optimizer.state_dict())]
        tables = self.optimizer.sparse if isinstance(self.optimizer, SplitOptimizer) else None
        if tables is not None:
            changed = [tensor for tensor in changed if tensor is not tables.state]
            tables.rehearsing = True
        before = [tensor.clone() for tensor in changed]
        drawn = [(generator, generator.get_state()) for generator in torch.cuda.default_generators]
        self.rate_1.zero_()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._step(norm=norm)
        torch.cuda.current_stream().wait_stream(side)
        if tables is not None:
            tables.rehearsing = False
        # In place: a graph that was captured before holds the addresses.
        for tensor, value in zip(changed, before):
            tensor.copy_(value)
        for generator, state in drawn:
            generator.set_state(state)
        torch.cuda.synchronize()

    def _record(self, clock: EventClock | None, *, norm: bool) -> torch.cuda.CUDAGraph | None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Most side streams of the model give way to the stream of the step's own chain of kernels.
            first = torch.cuda.Stream(priority=FIRST)  # type: ignore[no-untyped-call]
            # Other threads may allocate memory meanwhile, as those that prepare batches do.
            with torch.cuda.graph(graph, pool=self._pool, stream=first, capture_error_mode="thread_local"):
                if clock:
                    clock.begin()
                self._step(norm=norm)
                if clock:
                    clock.close()
        except RuntimeError as error:
            # Torch does not leave the capture's stream where ending the capture fails.
            torch.cuda.set_stream(stream)
            # Nor does its generator leave the capture; a copy of its state is in none.
            for generator in torch.cuda.default_generators:
                generator.graphsafe_set_state(generator.clone_state())
            # Ending the capture may fail in turn and hide why the step did.
            for cause in (error, error.__context__):
                if cause is not None and out_of_memory(cause):
                    raise cause from None
            torch.cuda.synchronize()
            self.model.forget_gradients()
            self.failed = True
            self._graphs.clear()
            message = str(error).strip().splitlines() or [type(error).__name__]
            why = f"the step could not be captured: {message[0]}"
            if self.requested_by:
                raise MachineError(f"no CUDA graph: {why}", fix=f"{self.requested_by} off") from error
            self.reasons["graph"] = f"off: {why}"
            return None
        self._pool = graph.pool()
        return graph


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of nested dictionaries and lists."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
