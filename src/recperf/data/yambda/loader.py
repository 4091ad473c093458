"""Threads prepare the next batches of a stream while the model uses the current one.

The order of the batches depends only on the `StreamOrder`, never on which thread is first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...config import within
from ...errors import MachineError, RecperfError
from .order import StreamOrder

Batch = TypeVar("Batch", covariant=True)


class BatchMaker(Protocol[Batch]):
    """Makes a batch from anchors; several threads call it at once."""

    def batch(self, positions_B: NDArray[np.int64]) -> Batch: ...


class Loader(Iterator[Batch]):
    """One pass over the batches of a stream, from batch `start` on.

    `workers` threads make batches, at most `prefetch` ahead of the current one. For a CUDA device the threads pin the
    batches, which are then copied asynchronously. Leaving the context manager stops all threads; they refer to no
    loader, so that one that is garbage-collected ends them too.
    """

    def __init__(
        self,
        order: StreamOrder,
        histories: BatchMaker[Batch],
        *,
        workers: int = 2,
        prefetch: int = 4,
        start: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        within(1, workers, 256, "workers")
        within(1, prefetch, 4096, "prefetch")
        within(0, start, len(order), "start")
        self.order, self.prefetch = order, prefetch
        self.device = None if device is None else torch.device(device)
        pinned = self.device is not None and self.device.type == "cuda"
        self._make = partial(_made, order, histories, pinned=pinned)
        self._numbers = iter(range(start, len(order)))
        self._batches: deque[tuple[int, Future[Batch]]] = deque()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="recperf-loader")
        self._window_pool = ThreadPoolExecutor(1, thread_name_prefix="recperf-loader-windows")
        self._window: int | None = None
        self._submit()

    def __next__(self) -> Batch:
        try:
            if not self._batches:
                raise StopIteration
            batch: Any = _result(*self._batches.popleft())
            self._submit()
            self._prepare_next_window()
            made: Batch = batch if self.device is None else batch.to(self.device, non_blocking=True)
            return made
        except BaseException:
            # Also at the end of the stream and after Ctrl-C: no thread outlives the stream.
            self.close()
            raise

    def __enter__(self) -> Loader[Batch]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the batches that no thread has begun, and wait for those that one has."""
        self._numbers = iter(())
        self._batches.clear()
        for pool in (self._pool, self._window_pool):
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        while len(self._batches) < self.prefetch and (number := next(self._numbers, None)) is not None:
            self._batches.append((number, self._pool.submit(self._make, number)))

    def _prepare_next_window(self) -> None:
        """Find the anchors of the window after the last submitted batch, in a thread that no batch waits for."""
        if not self._batches:
            return
        place = self.order.next_place(self.order.last_place(self._batches[-1][0]))
        if place is not None and place != self._window:
            self._window = place
            # An error is dropped here; the batch that needs the window raises it again.
            self._window_pool.submit(self.order.anchors, place)


def _made(order: StreamOrder, histories: BatchMaker[Batch], number: int, *, pinned: bool) -> Batch:
    """Make one batch; runs in a thread."""
    batch: Any = histories.batch(order.batch(number))
    made: Batch = batch.pin_memory() if pinned and not batch.labels_B.is_pinned() else batch
    return made


def _result(number: int, future: Future[Batch]) -> Batch:
    """The batch, or the thread's error with the number of the batch."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, RecperfError):
        raise type(error)(error.what, where={**error.where, "batch": number}, fix=error.fix) from error
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    raise MachineError(
        f"batch {number} could not be made: {cause}",
        where={"batch": number},
        fix="the stream can be entered again at this batch",
    ) from error
