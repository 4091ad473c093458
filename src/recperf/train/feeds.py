"""How batches reach a step: those of a captured one are drawn or gathered inside its graph, or copied before it is
replayed; others are prepared during the step before.

Preparing a batch waits for the GPU several times, because sizes depend on ids. On the stream of the training steps each
of these waits would last until the whole step before is done, so a thread does it on a separate CUDA stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..data.batch import ClickBatch, JaggedFeatures
from ..data.order import Samples, ShuffledOrder, permutation
from ..models.streams import SideStreams

if TYPE_CHECKING:
    from ..data.random_bags import RandomBags
    from ..models.tables import SparseGradients
    from .loop import Order


class Feed(Protocol):
    """Puts each batch into the memory that the graph reads."""

    @property
    def batch(self) -> Any:
        """The batch in that memory."""

    @property
    def counters(self) -> Sequence[Tensor]:
        """What `draw` changes besides the batch."""

    def load(self, batches: Iterator[Any]) -> Any | None:
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
    """Batches that the graph draws on the device; it counts their numbers itself.

    With `beside` each batch but the first is drawn during the backward pass of the step before, on a stream of its own:
    for a model that no longer reads its batch then.
    """

    def __init__(self, bags: RandomBags, *, beside: SideStreams | None = None) -> None:
        self.bags, self.batch, self.beside = bags, bags.buffers(), beside
        self.window_1 = torch.zeros(1, dtype=torch.int64, device=self.batch.labels_B.device)
        self._next = 0 if beside is None else -1
        """The batch that is drawn next or, beside a step, has been drawn."""
        self._drawn = False

    def load(self, batches: Iterator[DrawnBatch]) -> None:
        window = next(batches).window
        if window != self._next:
            self.window_1.fill_(window)
            if self.beside is not None:
                self._draw()
        self._next = window + 1

    @property
    def counters(self) -> Sequence[Tensor]:
        if self.beside is None:
            return [self.window_1]
        features = self.batch.features
        return [self.window_1, self.batch.dense_BD, features.values_V, features.offsets_FB1, self.batch.labels_B]

    def draw(self) -> None:
        if self.beside is None or not self._drawn:
            self._draw()

    def draw_next(self) -> None:
        """Draw the next batch, once the loss of this one is computed."""
        if self.beside is not None:
            with self.beside.run_after_all("data"):
                self._draw()

    def _draw(self) -> None:
        self._drawn = True
        self.bags.draw(self.window_1, self.batch)
        self.window_1.add_(1)


@dataclass(frozen=True, eq=False)
class IndexedBatch:
    """A batch as the place in an epoch's permutation of samples that lie on the device."""

    samples: Samples
    permutation_N: Tensor
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def slice(self, start: int, stop: int) -> IndexedBatch:
        return replace(self, start=self.start + start, stop=min(self.start + stop, self.stop))

    def gathered(self) -> ClickBatch:
        return gathered(self.samples, self.permutation_N[self.start : self.stop])


def gathered(samples: Samples, rows_B: Tensor) -> ClickBatch:
    """The samples with these numbers as a batch."""
    ids_FB = samples.ids_FN.t().index_select(0, rows_B).t()
    features = JaggedFeatures.from_ids(samples.keys, ids_FB)
    return ClickBatch(samples.dense_ND.index_select(0, rows_B), features, samples.labels_N.index_select(0, rows_B))


@dataclass(frozen=True)
class IndexedOrder:
    """The batches of a shuffled order, without gathering them."""

    order: ShuffledOrder

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int = 0) -> Iterator[IndexedBatch]:
        samples, size = self.order.samples, self.order.batch_size
        permutation_N = permutation(len(samples), self.order.seed, epoch).to(samples.labels_N.device)
        return (
            IndexedBatch(samples, permutation_N, number * size, min((number + 1) * size, len(samples)))
            for number in range(start, len(self))
        )


class IndexedFeed:
    """Batches of samples on the device that the graph gathers; it counts their places in the permutation itself."""

    def __init__(self, order: ShuffledOrder) -> None:
        samples, device = order.samples, order.samples.labels_N.device
        self.samples = samples
        self.permutation_N = torch.arange(len(samples), device=device)
        self.steps_B = torch.arange(min(order.batch_size, len(samples)), device=device)
        self.start_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.batch = gathered(samples, self.steps_B)
        self._loaded: Tensor | None = None
        self._next = 0

    @property
    def counters(self) -> Sequence[Tensor]:
        return [self.start_1]

    def load(self, batches: Iterator[IndexedBatch]) -> ClickBatch | None:
        batch = next(batches)
        if len(batch) != len(self.batch):
            return batch.gathered()
        if batch.permutation_N is not self._loaded:
            self.permutation_N.copy_(batch.permutation_N)
            self._loaded = batch.permutation_N
        if batch.start != self._next:
            self.start_1.fill_(batch.start)
        self._next = batch.stop
        return None

    def draw(self) -> None:
        # Clamped because the warm-up before a capture draws beyond the batch that was loaded.
        places_B = (self.start_1 + self.steps_B).clamp_(max=len(self.samples) - 1)
        self.batch = gathered(self.samples, self.permutation_N.index_select(0, places_B))
        self.start_1.add_(len(self.batch))


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

    @property
    def counters(self) -> Sequence[Tensor]:
        return []

    def draw(self) -> None:
        """Does nothing: the batch was copied."""


AHEAD = 4
"""Batches that are prepared on the host before they are used."""


class DeviceBatch(Protocol):
    """The input of a step, on a device."""

    def record_stream(self, stream: Any) -> None:
        """Keep its memory until the stream has executed what is queued so far."""


Batch = TypeVar("Batch")
Input = TypeVar("Input", bound=DeviceBatch)


def prefetched(
    batches: Iterator[Batch],
    prepare: Callable[[Batch], Input],
    device: torch.device,
    *,
    depth: int = 1,
    finished: Callable[[Input], None] | None = None,
    waited: Callable[[float], None] | None = None,
) -> Iterator[Input]:
    """Each batch prepared, in order, up to `depth` of them ahead of the running step: on a GPU, and wherever someone
    wants to know that a batch is `finished`, which is when the next one is asked for or nobody will use it. `waited` is
    called with the time that each step waited for its batch."""
    if device.type != "cuda" and finished is None:
        yield from map(prepare, batches)
        return
    finish = finished or (lambda prepared: None)
    stream = _Stream(device, waited) if device.type == "cuda" else None

    def next_input() -> tuple[Input, Any] | None:
        with stream or nullcontext():
            for batch in batches:
                prepared = prepare(batch)
                return prepared, stream and stream.event()
        return None

    ready: deque[Future[tuple[Input, Any] | None]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="recperf-prefetch") as thread:
        try:
            ready.extend(thread.submit(next_input) for _ in range(depth))
            began = stream.asked() if stream is not None else perf_counter()
            while (result := ready.popleft().result()) is not None:
                prepared, event = result
                if stream is not None:
                    stream.join(prepared, event, began)
                elif waited is not None:
                    waited(perf_counter() - began)
                ready.append(thread.submit(next_input))
                try:
                    yield prepared
                finally:
                    # Before `finish`, which may wait for a batch that is being prepared.
                    began = stream.asked() if stream is not None else perf_counter()
                    finish(prepared)
                del prepared, result
        finally:
            for future in ready:
                # Whoever closes the batches early does not need the error of one that nobody uses.
                if not future.cancel() and future.exception() is None and (unused := future.result()) is not None:
                    finish(unused[0])


class _Stream:
    """A CUDA stream on which batches are prepared for the stream of the training steps."""

    def __init__(self, device: torch.device, waited: Callable[[float], None] | None) -> None:
        self.waited, self._waits = waited, deque[tuple[Any, Any]]()
        self.steps = torch.cuda.current_stream(device)
        # Its many small kernels would each wait for a large one of the step.
        self.side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        self._entered = torch.cuda.stream(self.side)
        self._entered.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)

    def event(self) -> Any:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(self.side)
        return ready

    def asked(self) -> Any:
        """The moment on the stream of the steps at which the step before is done and the next batch is asked for."""
        if self.waited is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.steps)
        return event

    def join(self, prepared: DeviceBatch, ready: Any, asked: Any) -> None:
        """Let the steps wait for a batch, and its memory for the steps."""
        self.steps.wait_event(ready)
        prepared.record_stream(self.steps)
        if self.waited is None:
            return
        after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        after.record(self.steps)
        self._waits.append((asked, after))
        while self._waits and self._waits[0][1].query():
            asked, after = self._waits.popleft()
            self.waited(asked.elapsed_time(after) / 1e3)


@dataclass(frozen=True)
class PlacedOrder:
    """Batches with features whose rows are in the cache of tables in tiers, placed there while earlier steps run."""

    order: Order
    tables: SparseGradients
    device: torch.device

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        tiers, owner = self.tables.tiers, object()
        assert tiers is not None

        def place(batch: Any) -> Any:
            return replace(batch, features=self.tables.place(batch.features, owner))

        def finish(batch: Any) -> None:
            tiers.finish(batch.features.placed)

        batches = self.order.batches(epoch, start)
        return prefetched(batches, place, self.device, depth=tiers.config.depth, finished=finish, waited=tiers.waited)


def prepared_on_host(batches: Iterator[Batch], prepare: Callable[[Batch], Input]) -> Iterator[Input]:
    """Each batch prepared by a thread of the host, in order and ahead of the running step.

    More threads would be slower: small operators spend their time where Python's lock lets only one of them run.
    """
    return prefetched(batches, prepare, torch.device("cpu"), depth=AHEAD, finished=lambda prepared: None)
