"""The batches of a stream of windows: which anchors each has, and threads that prepare the next ones.

The anchors of batch i are a pure function, so that training can resume at any batch; the order of the batches never
depends on which thread is first.

Shapes: B anchors a batch, N anchors of a window, S windows of the stream.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...config import require, within
from ...errors import MachineError, RecperfError
from .config import Leftover
from .windows import Users, WindowIndex

Batch = TypeVar("Batch")
_MIN_CACHED = 3
"""Minimum number of cached windows: batches of several threads may lie in neighbouring ones."""
_MAX_CACHED = 64
_SMALL = 1 << 20
"""Number of anchors up to which more windows are cached."""


class StreamOrder:
    """Batches of anchors, window after window.

    `leftover` decides about anchors that do not fill a batch at the end of a window: "drop" omits them, "carry" fills
    the batch from the next window, so that only the last batch of the stream is short.
    """

    def __init__(
        self,
        index: WindowIndex,
        *,
        windows: Sequence[int],
        batch_size: int,
        leftover: Leftover = "drop",
        users: Users = "train",
    ) -> None:
        within(1, batch_size, 1 << 24, "batch_size")
        require(leftover in ("drop", "carry"), "leftover", leftover, "drop, carry")
        for window in (min(windows, default=0), max(windows, default=0)):
            within(0, window, index.windows - 1, "windows")
        self.index, self.windows, self.users = index, windows, users
        self.batch_size, self.leftover = batch_size, leftover
        self.counts_S = index.counts(users)[np.asarray(windows, dtype=np.int64)]
        """Number of anchors of each window of the stream."""
        used_S = self.counts_S // batch_size * batch_size if leftover == "drop" else self.counts_S
        self._before_S1 = np.concatenate([[0], np.cumsum(used_S)])
        """Number of anchors before each window, those that are dropped left out."""
        self._cached: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of batches of the stream."""
        return -(-self.samples // self.batch_size)

    @property
    def samples(self) -> int:
        """Number of anchors in all batches."""
        return int(self._before_S1[-1])

    @property
    def leftovers_S(self) -> NDArray[np.int64]:
        """Number of anchors that do not fill a batch at the end of each window."""
        ends_S = self._before_S1[1:] if self.leftover == "carry" else self.counts_S
        return np.asarray(ends_S % self.batch_size)

    @property
    def seams_S(self) -> NDArray[np.int64]:
        """For each window, the number of batches that have no anchor of a later window."""
        ends_S = self._before_S1[1:]
        # The last anchors of the stream may make a short batch.
        return np.where(ends_S == self.samples, len(self), ends_S // self.batch_size)

    def samples_until(self, number: int) -> int:
        """Number of anchors in the batches before this one."""
        return self._span(number)[0] if number < len(self) else self.samples

    def batch(self, number: int) -> NDArray[np.int64]:
        """Positions of one batch's anchors; only its own windows are read."""
        start, stop = self._span(number)
        parts = []
        for window_index in range(self._window_index(start), self._window_index(stop - 1) + 1):
            begin, end = int(self._before_S1[window_index]), int(self._before_S1[window_index + 1])
            if begin < end:
                parts.append(self.anchors(window_index)[max(0, start - begin) : min(stop, end) - begin])
        return np.concatenate(parts)

    def last_window_index(self, number: int) -> int:
        """The index, within the stream, of the window in which a batch ends."""
        return self._window_index(self._span(number)[1] - 1)

    def anchors(self, window_index: int) -> NDArray[np.int64]:
        """The anchors of a window of the stream in training order, cached; threads that need others wait."""
        with self._lock:
            if window_index not in self._cached:
                self._cached[window_index] = self.index.order(self.windows[window_index], self.users)
            self._cached.move_to_end(window_index)
            size = sum(map(len, self._cached.values()))
            while len(self._cached) > _MIN_CACHED and (size > _SMALL or len(self._cached) > _MAX_CACHED):
                size -= len(self._cached.popitem(last=False)[1])
            return self._cached[window_index]

    def _span(self, number: int) -> tuple[int, int]:
        """The first anchor of a batch and the one after its last, counted from the start of the stream."""
        if not 0 <= number < len(self):
            raise IndexError(f"there is no batch {number}: the stream has {len(self)}")
        start = number * self.batch_size
        return start, min(start + self.batch_size, self.samples)

    def _window_index(self, anchor: int) -> int:
        """The window of an anchor of the stream."""
        return int(np.searchsorted(self._before_S1, anchor, side="right")) - 1


def load(
    order: StreamOrder,
    make: Callable[[NDArray[np.int64]], Batch],
    *,
    workers: int = 2,
    prefetch: int = 4,
    start: int = 0,
    device: torch.device | str | None = None,
) -> Generator[Batch, None, None]:
    """One pass over the batches of a stream, from batch `start` on.

    `workers` threads make batches of anchors with `make`, at most `prefetch` ahead of the current one. For a CUDA
    device the threads pin the batches, which are then copied asynchronously. Closing the generator stops all threads.
    """
    within(1, workers, 256, "workers")
    within(1, prefetch, 4096, "prefetch")
    within(0, start, len(order), "start")
    device = None if device is None else torch.device(device)
    pinned = device is not None and device.type == "cuda"

    def made(number: int) -> Any:
        batch: Any = make(order.batch(number))
        return batch.pin_memory() if pinned and not batch.labels_B.is_pinned() else batch

    numbers = iter(range(start, len(order)))
    pool = ThreadPoolExecutor(workers, thread_name_prefix="recperf-loader")
    try:
        batches = deque((number, pool.submit(made, number)) for number in islice(numbers, prefetch))
        while batches:
            batch = _result(*batches.popleft())
            batches.extend((number, pool.submit(made, number)) for number in islice(numbers, 1))
            yield batch if device is None else batch.to(device, non_blocking=True)
    finally:
        # Also after an error and Ctrl-C: no thread outlives the stream.
        pool.shutdown(wait=True, cancel_futures=True)


def _result(number: int, future: Future[Any]) -> Any:
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
