"""Times the steps of a GPU, and the spans of a step, with CUDA events, without synchronising between them.

An event is queued at every boundary of a span. The time between two events is that of the work queued between them,
including any wait of the device for the host, so the parts sum to the step as the device executed it. All events are in
the stream in which the step began: work in another stream takes time only where that stream waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import torch

from .spans import StepClock


class StepMarks:
    """The times of steps, from marks at their boundaries: moments of the host's clock, or events in the device's queue,
    which are read long after they were queued so that no step waits for them."""

    UNREAD = 512
    BEHIND = 128
    """More steps than are ever queued at once: losses are logged more often, which waits for the device."""

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        self._new_event, self._free = new_event, list[Any]()
        self._marks: list[tuple[Any, bool]] = []
        """Each mark, and whether a step ends there."""
        self._ns: list[int] = []

    def begin(self) -> None:
        """Mark where the next step begins; without a mark it begins where the last one ended."""
        self._mark(is_step=False)

    def end_step(self) -> None:
        self._mark(is_step=True)
        if len(self._marks) > self.UNREAD:
            self._read(len(self._marks) - self.BEHIND)

    def read(self) -> list[int]:
        """The time of every step since the last call, in ns. The device must have finished them."""
        self._read(len(self._marks))
        times, self._ns, self._marks = self._ns, [], []
        return times

    def _mark(self, *, is_step: bool) -> None:
        if self._new_event is None:
            self._marks.append((perf_counter_ns(), is_step))
            return
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._marks.append((event, is_step))

    def _read(self, count: int) -> None:
        read, self._marks = self._marks[:count], self._marks[max(0, count - 1) :]
        if self._new_event is None:
            self._ns += [end - begin for (begin, _), (end, is_step) in pairwise(read) if is_step]
        elif read:
            read[-1][0].synchronize()
            self._ns += [
                round(begin.elapsed_time(end) * 1e6) for (begin, _), (end, is_step) in pairwise(read) if is_step
            ]
            self._free += [event for event, _ in read[:-1]]


def timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class EventClock(StepClock):
    """Divides the device time of a step among its spans, with events in the stream that is current when it begins.

    With `captured` the events become part of a CUDA graph during its capture, and `read` returns the times of the last
    replay. Reading waits for the device.
    """

    def __init__(self, *, captured: bool = False) -> None:
        super().__init__()
        self._kinds = {"external": True} if captured else {}
        self._stream: Any = None

    def begin(self) -> None:
        self._stream = torch.cuda.current_stream()
        super().begin()

    def read(self) -> tuple[int, dict[str, int]]:
        self._marks[-1][1].synchronize()
        return super().read()

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True, **self._kinds)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _between(self, begin: Any, end: Any) -> int:
        ms: float = begin.elapsed_time(end)
        return round(ms * 1e6)


def step_clock(sync: Callable[[], None] | None) -> StepClock:
    """A clock for the device: by events where it works asynchronously."""
    return StepClock() if sync is None else EventClock()
