"""Prepares the next batches during the current step: on a GPU in a thread, on a separate CUDA stream, or on the host.

Preparing a batch waits for the GPU several times, because sizes depend on ids. On the stream of the training steps each
of these waits would last until the whole step before is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch

AHEAD = 4
"""Batches that are prepared on the host before they are used."""


class Prepared(Protocol):
    """The input of a step, on a device."""

    def record_stream(self, stream: Any) -> None:
        """Keep its memory until the stream has executed what is queued so far."""


Batch = TypeVar("Batch")
Input = TypeVar("Input", bound=Prepared)


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

    def join(self, prepared: Prepared, ready: Any, asked: Any) -> None:
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


def prepared_on_host(batches: Iterator[Batch], prepare: Callable[[Batch], Input]) -> Iterator[Input]:
    """Each batch prepared by a thread of the host, in order and ahead of the running step.

    More threads would be slower: small operators spend their time where Python's lock lets only one of them run.
    """
    return prefetched(batches, prepare, torch.device("cpu"), depth=AHEAD, finished=lambda prepared: None)
