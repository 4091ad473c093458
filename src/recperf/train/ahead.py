"""The next batch made ready for a GPU while this one is trained on: by a thread, in a queue of its own.

Making a batch ready waits for the GPU a few times, since sizes depend on ids. In the queue of the steps each of these
waits would be one for the whole step before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch


class Ready(Protocol):
    """What a step reads, on a device."""

    def record_stream(self, stream: Any) -> None:
        """Keep its memory until that queue has done what it was given so far."""


Batch = TypeVar("Batch")
Made = TypeVar("Made", bound=Ready)


def made_ahead(batches: Iterator[Batch], make: Callable[[Batch], Made], device: torch.device) -> Iterator[Made]:
    """What `make` makes of each batch, in order; on a GPU one ahead of the step that runs."""
    if device.type != "cuda":
        yield from map(make, batches)
        return
    steps, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def following() -> tuple[Made, Any] | None:
        with torch.cuda.stream(beside):
            for batch in batches:
                made, ready = make(batch), torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record(beside)
                return made, ready
        return None

    with ThreadPoolExecutor(1, thread_name_prefix="recperf-ahead") as thread:
        coming = thread.submit(following)
        while (found := coming.result()) is not None:
            made, ready = found
            steps.wait_event(ready)
            made.record_stream(steps)
            coming = thread.submit(following)
            yield made
            del made, found
