"""Prepares the next batches during the current step: on a GPU in a thread, on a separate CUDA stream, or on the host.

Preparing a batch waits for the GPU several times, because sizes depend on ids. On the stream of the training steps each
of these waits would last until the whole step before is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

AHEAD = 4
"""Batches that are prepared on the host before they are used."""


class Prepared(Protocol):
    """The input of a step, on a device."""

    def record_stream(self, stream: Any) -> None:
        """Keep its memory until the stream has executed what is queued so far."""


Batch = TypeVar("Batch")
Result = TypeVar("Result")
Input = TypeVar("Input", bound=Prepared)


def prefetched(batches: Iterator[Batch], prepare: Callable[[Batch], Input], device: torch.device) -> Iterator[Input]:
    """Each batch prepared, in order; on a GPU one batch ahead of the running step."""
    if device.type != "cuda":
        yield from map(prepare, batches)
        return
    steps, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def next_input() -> tuple[Input, Any] | None:
        with torch.cuda.stream(side):
            for batch in batches:
                prepared, ready = prepare(batch), torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record(side)
                return prepared, ready
        return None

    with ThreadPoolExecutor(1, thread_name_prefix="recperf-prefetch") as thread:
        future = thread.submit(next_input)
        while (result := future.result()) is not None:
            prepared, ready = result
            steps.wait_event(ready)
            prepared.record_stream(steps)
            future = thread.submit(next_input)
            yield prepared
            del prepared, result


def prepared_on_host(batches: Iterator[Batch], prepare: Callable[[Batch], Result]) -> Iterator[Result]:
    """Each batch prepared by a thread of the host, in order and ahead of the running step.

    More threads would be slower: small operators spend their time where Python's lock lets only one of them run.
    """
    ready: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="recperf-prepare") as thread:
        for batch in batches:
            ready.append(thread.submit(prepare, batch))
            if len(ready) > AHEAD:
                yield ready.popleft().result()
        while ready:
            yield ready.popleft().result()
