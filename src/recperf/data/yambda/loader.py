"""Batches made ahead by threads, in exactly the order that was asked for.

The consumer hands out numbered jobs and takes their results in turn; which thread made what, and when, changes nothing.
Threads know the jobs but not the stream that reads them, so that a forgotten stream can be collected and ends them.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...config import within
from ...errors import MachineError, RecperfError
from ..batch import HistoryBatch
from .order import StreamOrder

_LOOK_S = 0.5
"""A waiting consumer looks this often whether the threads still live."""


class Gather(Protocol):
    """Makes batches of anchors; called by several threads at once."""

    def batch(self, positions_B: NDArray[np.int64]) -> HistoryBatch: ...


@dataclass(eq=False)
class _Job:
    """A batch to make, then the batch or why there is none."""

    number: int
    done: threading.Event = field(default_factory=threading.Event)
    batch: HistoryBatch | None = None
    error: BaseException | None = None


class _Crew:
    """The threads of one stream: workers that make batches, and one that finds the anchors of the next window."""

    def __init__(self, order: StreamOrder, gather: Gather, workers: int, pin: bool) -> None:
        self.order, self.gather, self.pin = order, gather, pin
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.places: SimpleQueue[int | None] = SimpleQueue()
        self.stopping = threading.Event()
        self.workers = [self._thread(_work, f"recperf-loader-{number}") for number in range(workers)]
        self.scout = self._thread(_look_ahead, "recperf-loader-windows")
        _crews.add(self)
        try:
            for thread in (*self.workers, self.scout):
                thread.start()
        except BaseException:
            self.stop()
            raise

    def _thread(self, work: object, name: str) -> threading.Thread:
        # Daemons, because Python joins all others at exit before anything could tell them to stop.
        return threading.Thread(target=work, args=(self,), name=name, daemon=True)  # type: ignore[arg-type]

    def stop(self) -> None:
        """Tell all threads to end; waits for none, as the garbage collector may call this from any of them."""
        self.stopping.set()
        for queue in (self.jobs, self.places):
            with suppress(Empty):
                while True:
                    queue.get_nowait()
        for _ in self.workers:
            self.jobs.put(None)
        self.places.put(None)

    def join(self) -> None:
        for thread in (*self.workers, self.scout):
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    def make(self, number: int) -> HistoryBatch:
        batch = self.gather.batch(self.order.batch(number))
        return batch.pin_memory() if self.pin and not batch.labels_B.is_pinned() else batch


_crews: weakref.WeakSet[_Crew] = weakref.WeakSet()


def _end(crews: weakref.WeakSet[_Crew]) -> None:
    living = list(crews)
    for crew in living:
        crew.stop()
    for crew in living:
        crew.join()


# No thread may still read mapped files while the interpreter takes them apart.
atexit.register(_end, _crews)


def _work(crew: _Crew) -> None:
    while (job := crew.jobs.get()) is not None and not crew.stopping.is_set():
        try:
            job.batch = crew.make(job.number)
        except BaseException as error:  # SystemExit too: whatever ends a job is told to whoever waits for it
            job.error = error
        job.done.set()
        # An idle thread must not keep the last batch alive.
        del job


def _look_ahead(crew: _Crew) -> None:
    while (place := crew.places.get()) is not None and not crew.stopping.is_set():
        # What is wrong with a window is told by the batch that needs it.
        with suppress(Exception):
            crew.order.anchors(place)


class Loader:
    """Batches of a stream from `start` on; each `iter` reads it again from there.

    `workers` threads make batches, at most `prefetch` ahead of the one in use. With a CUDA device batches are pinned by
    the threads and copied without waiting. As a context manager it ends every stream that is still open.
    """

    def __init__(
        self,
        order: StreamOrder,
        histories: Gather,
        *,
        workers: int = 2,
        prefetch: int = 4,
        start: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        within(1, workers, 256, "workers")
        within(1, prefetch, 4096, "prefetch")
        within(0, start, len(order), "start")
        self.order, self.histories = order, histories
        self.workers, self.prefetch, self.start = workers, prefetch, start
        self.device = None if device is None else torch.device(device)
        self._crews: weakref.WeakSet[_Crew] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self.order) - self.start

    def __iter__(self) -> _Stream:
        crew = _Crew(self.order, self.histories, self.workers, self.device is not None and self.device.type == "cuda")
        self._crews.add(crew)
        return _Stream(self, crew)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every stream that is still open, and wait for the threads of those that were forgotten."""
        _end(self._crews)


class _Stream(Iterator[HistoryBatch]):
    """One pass over a loader's batches."""

    def __init__(self, loader: Loader, crew: _Crew) -> None:
        self._order, self._device = loader.order, loader.device
        self._next, self._prefetch = loader.start, loader.prefetch
        self._jobs: deque[_Job] = deque()
        self._asked: int | None = None
        self._crew = crew
        self._at_end = weakref.finalize(self, crew.stop)
        self._at_end.atexit = False
        self._fill()

    def __next__(self) -> HistoryBatch:
        if self._crew.stopping.is_set():
            raise StopIteration
        try:
            self._fill()
            if not self._jobs:
                raise StopIteration
            batch = self._taken(self._jobs[0])
            self._jobs.popleft()
            self._fill()
            self._prepare_next_window()
            return batch if self._device is None else batch.to(self._device, non_blocking=True)
        except BaseException:
            # Ctrl-C while waiting, a failed batch, the end: in every case nothing is left running.
            self.close()
            raise

    def close(self) -> None:
        """End the threads and wait for them; what was made ahead is dropped."""
        self._at_end()
        self._crew.join()
        self._jobs.clear()

    def _fill(self) -> None:
        while len(self._jobs) < self._prefetch and self._next < len(self._order):
            job = _Job(self._next)
            self._next += 1
            self._jobs.append(job)
            self._crew.jobs.put(job)

    def _prepare_next_window(self) -> None:
        if not self._jobs:
            return
        place = self._order.next_place(self._order.last_place(self._jobs[-1].number))
        if place is not None and place != self._asked:
            self._asked = place
            self._crew.places.put(place)

    def _taken(self, job: _Job) -> HistoryBatch:
        while not job.done.wait(_LOOK_S):
            if not all(worker.is_alive() for worker in self._crew.workers) and not job.done.is_set():
                raise MachineError(
                    f"batch {job.number} was not made: a thread of the loader ended",
                    where={"batch": job.number},
                    fix="start again from the last checkpoint",
                )
        if job.error is not None:
            raise _explained(job.number, job.error) from job.error
        assert job.batch is not None
        return job.batch


def _explained(number: int, error: BaseException) -> RecperfError:
    """The error of a thread, told with the batch it was making."""
    if isinstance(error, RecperfError):
        return type(error)(error.what, where={**error.where, "batch": number}, fix=error.fix)
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return MachineError(
        f"batch {number} could not be made: {cause}",
        where={"batch": number},
        fix="the stream can be entered again at this batch",
    )
