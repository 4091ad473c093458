"""Clocks of steps: of their thread, of a GPU by CUDA events; and their spans and modules as named ranges.

A CUDA event is queued at every boundary of a span, without synchronising. The time between two events is that of the
work queued between them, including any wait of the device for the host, so the parts sum to the step as the device
executed it. All events are in the stream in which the step began: work in another stream takes time only where that
stream waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any, NamedTuple

import torch
from torch import nn

from ..ops.operators import fast_range
from .cost import Cost
from .profile_records import Component
from .records import Percentiles
from .spans import OTHER, StepClock, is_wait, phase_of
from .trace.nesting import spread as percentiles
from .trace.read import PART

MODULE = "recperf.module."
"""Begins the ranges of modules."""
MOST_PLAIN = 200
"""Steps that are timed at most."""
TRACED = 4


@dataclass(frozen=True)
class Counts:
    """How many steps to observe, where ranks must take the same number or time is short."""

    warm: int
    plain: int
    traced: int
    counted: int
    again: int = 0
    """Plain steps after the others."""

    @classmethod
    def within(cls, step_ms: float, seconds: float) -> Counts:
        """Counts with which small steps take about this time together; long steps are observed the fewest times."""
        fitting = max(1, int(seconds * 1e3 / max(step_ms, 1e-3)))
        return cls(1, max(2, min(MOST_PLAIN, fitting // 2)), max(1, min(TRACED, fitting // 3)), 2 + (fitting >= 16))


class ClockReading(NamedTuple):
    wall: int
    cpu: int
    waiting: int
    """Time since the thread began in which it could have run but other work had its core."""
    process: int
    """CPU time of all threads of the process."""

    def since(self, before: ClockReading) -> ClockReading:
        return ClockReading(*(now - then for now, then in zip(self, before, strict=True)))

    def plus(self, other: ClockReading) -> ClockReading:
        return ClockReading(*(one + more for one, more in zip(self, other, strict=True)))

    @property
    def off(self) -> int:
        """Time in which the thread waited for something other than a core: a sleep, a lock, a disk."""
        return max(0, self.wall - self.cpu - self.waiting)


class TracingCost:
    """CPU time of all threads that tracing and counting add to the steps."""

    def __init__(self) -> None:
        self.ns = self.plain_ns = 0.0
        """In all, and what a plain step takes."""
        self._since = (process_time_ns(), 0)

    def begin(self, steps: int) -> None:
        """After so many steps plain ones begin."""
        self._since = (process_time_ns(), steps)

    def begin_traced(self, steps: int) -> None:
        began, before = self._since
        self.begin(steps)
        self.plain_ns = (self._since[0] - began) / max(1, steps - before)

    def add(self, steps: int) -> None:
        """After so many steps those that are traced or counted end."""
        began, before = self._since
        self.ns += max(0.0, process_time_ns() - began - self.plain_ns * (steps - before))


class TimedStep(NamedTuple):
    whole: ClockReading
    input: ClockReading
    """Its wait for input."""
    ranks: ClockReading
    """Its waits for other ranks."""


class ThreadClock:
    """Reads the clocks of the thread that created it, in a few microseconds."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None
        self.tells_waiting = self._file is not None
        """Whether the system tells how long the thread waited for a core."""

    def now(self) -> ClockReading:
        waiting = 0
        if self._file is not None:
            try:
                waiting = int(os.pread(self._file, 96, 0).split()[1])
            except (OSError, IndexError, ValueError):
                waiting = 0
        return ClockReading(perf_counter_ns(), thread_time_ns(), waiting, process_time_ns())

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class SpanRanges:
    """Listens to the spans of recperf's own steps."""

    def __init__(self, observer: Any) -> None:
        # An Observer, whose module imports this one.
        self._observer = observer
        self._open: list[tuple[str, Any, ClockReading | None]] = []
        self._waiting = False

    @property
    def inside(self) -> str:
        """The innermost open span, which names the exchanges inside it."""
        return self._open[-1][0] if self._open else ""

    def enter(self, name: str) -> None:
        scope = since = None
        if self._observer.state == "traced":
            scope = fast_range(PART + name)
            scope.__enter__()
        if not self._waiting and is_wait(name):
            self._waiting, since = True, self._observer.clock.now()
            self._observer.waiting = "input" if name == "data" else "ranks"
        self._open.append((name, scope, since))

    def leave(self) -> None:
        name, scope, since = self._open.pop()
        if since is not None:
            self._waiting, self._observer.waiting = False, ""
            self._observer.waited(since, for_ranks=name != "data")
        if scope is not None:
            scope.__exit__(None, None, None)


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Record the forward pass of every module of the model as a named range."""
    open_ranges: list[Any] = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            scope = fast_range(MODULE + name)
            scope.__enter__()
            open_ranges.append(scope)

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        if name and not isinstance(module, (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule)):
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def cuda_used() -> bool:
    """Whether this process has used a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class GpuStretches:
    """Stretches of steps on a GPU between two synchronised moments: several steps each, since the host runs ahead into
    the next one. `count` is the number of steps so far."""

    LENGTH_NS = 50_000_000

    def __init__(self) -> None:
        self.active = False
        self.times: list[tuple[int, int]] = []
        """Steps and ns of each."""
        self._steps = 1
        self._began = (0, 0)

    def open(self, count: int) -> None:
        if self.active:
            torch.cuda.synchronize()
            self._began = (count, perf_counter_ns())

    def step(self, count: int) -> None:
        """End the stretch if it is long enough, and begin the next one."""
        if count - self._began[0] >= self._steps:
            self.close(count)
            self.open(count)

    def close(self, count: int) -> None:
        first, began = self._began
        if self.active and count > first:
            torch.cuda.synchronize()
            self.times.append((count - first, perf_counter_ns() - began))
            # Waiting for the device costs some microseconds, which must not matter in a block.
            self._steps = max(1, min(50, round(self.LENGTH_NS * self.times[-1][0] / self.times[-1][1])))


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


Reading = tuple[int, dict[str, int]]
"""Wall time of a step and of its parts, in ns."""


def spread(nanoseconds: list[int]) -> Percentiles:
    """p20, p50 and p80 in ms."""
    return percentiles([ns / 1e6 for ns in nanoseconds])


def components(clocked: list[Reading], costs: dict[str, Cost]) -> list[Component]:
    """Each part with its time, its share (all sum to 1) and its counted work, in the order they first ran.

    Shares are of the sum of the medians, so that a few slow steps change no share and none contradicts a time. A cost
    with an undeclared name is an error.
    """
    names = list(dict.fromkeys(name for _, parts in clocked for name in parts))
    times = {name: spread([parts.get(name, 0) for _, parts in clocked]) for name in names}
    whole = sum(ms.p50 for ms in times.values()) or 1.0
    booked: dict[str, Cost] = {}
    for name, cost in costs.items():
        # Work whose own span was not opened counts for the span that names its phase, or for "other": none is lost.
        phase = phase_of(name)
        span = name if name in names else phase if phase in names else OTHER
        if span == name or cost != Cost():
            booked[span] = booked.get(span, Cost()) + cost
    rows = []
    for name in names:
        work = (booked[name].flops, booked[name].bytes) if name in booked else (None, None)
        rows.append(Component(name, phase_of(name), times[name], times[name].p50 / whole, *work))
    return rows
