"""Host events of a trace and how they nest, its steps, and the device work that each step launched."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable
from statistics import quantiles

from ..records import Percentiles
from .read import PART, STEP, STEP_OF_TORCH, Host, Trace, TracedDevice, find_steps, optimizer_steps, summed
from .records import Window

ROUNDING = 0.002
"""Microseconds by which a child may seem to outlast its parent: files have three decimals."""
WHOLE = 1.0
"""The tolerance for files of old profilers, which have whole microseconds."""
NONE = -1
_AUTOGRAD = "autograd::"
_INPUT_PART = re.compile(r"(?:.*_)?data$")
_LOADER = re.compile(r"enumerate\(DataLoader\)|DataLoader.*__next__")
"""Names of the range that torch records around its own loader."""
_NUMBERED = re.compile(r"#\d+$")
COLLECTIVE = re.compile(r"(?:nccl|gloo|mpi|ucc|xccl|hccl):(?:\w+)")
"""The range that torch records around a collective, in whatever thread runs it."""
SMALL_US = 10.0
"""A kernel shorter than this takes about as long to launch as to run."""


class Nesting:
    """Host events ordered by thread and time, each with the event that encloses it.

    Parts are the ranges of recperf's spans. A trace without them was recorded by another program: then
    every `record_function` region and every module is a part, named after those around it: `train/Net_0/Linear_1`.
    """

    def __init__(self, trace: Trace) -> None:
        self.events = sorted(trace.host, key=lambda event: (event.thread, event.start, -event.end))
        self.foreign = not any(event.kind == "range" and event.name.startswith(PART) for event in self.events)
        whole = all(event.start.is_integer() and event.end.is_integer() for event in self.events)
        self.rounding = WHOLE if whole else ROUNDING
        self.parent = _parents(self.events, self.rounding)
        self.steps = find_steps(trace.host)
        self.steps_from = "names" if self.steps else "optimizer"
        self.steps = self.steps or optimizer_steps(trace.host)
        time = summed((event.thread, event.end - event.start) for event in self.events)
        self.thread = self.steps[0].thread if self.steps else max(time, key=lambda name: time[name], default="")
        self._starts = [step.start for step in self.steps]
        self.region: list[int] = []
        """The innermost part at or around every event, as an index, or NONE."""
        self.part = self._parts()
        """The name of that part."""
        waits = (event for event in self.events if event.thread == self.thread and event.kind != "call")
        self.inputs = merged((event.start, event.end) for event in waits if self._is_input(event))
        self._calls: dict[int, int] = {}
        self._ops: dict[int, int] = {}
        for index, event in enumerate(self.events):
            if event.kind == "call" and event.correlation is not None:
                self._calls.setdefault(event.correlation, index)
            elif event.external is not None and event.kind == "op":
                self._ops[event.external] = index

    def launch(self, work: TracedDevice) -> int:
        """The call that launched device work, or NONE."""
        return NONE if work.correlation is None else self._calls.get(work.correlation, NONE)

    def origin(self, work: TracedDevice) -> int:
        """That call, else the operator that the device work names, else NONE."""
        call = self.launch(work)
        return call if call != NONE or work.external is None else self._ops.get(work.external, NONE)

    def above(self, index: int, kind: str) -> int:
        """The nearest event of a kind at or above this one, or NONE."""
        while index != NONE and self.events[index].kind != kind:
            index = self.parent[index]
        return index

    def outer(self, index: int, name: str) -> int:
        """The nearest event at or above this one whose name begins so, or NONE."""
        while index != NONE and not self.events[index].name.startswith(name):
            index = self.parent[index]
        return index

    def outermost(self, index: int, kind: str) -> int:
        last = NONE
        while index != NONE:
            last = index if self.events[index].kind == kind else last
            index = self.parent[index]
        return last

    def part_of(self, index: int) -> str | None:
        return None if index == NONE else self.part[index]

    def name_of_part(self, event: Host) -> str | None:
        if event.kind != "range":
            return None
        if not self.foreign:
            return event.name.removeprefix(PART) if event.name.startswith(PART) else None
        name = _NUMBERED.sub("", event.name)
        first = bisect_left(self._starts, event.start)
        around_a_step = first < len(self.steps) and self.steps[first].end <= event.end
        is_part = name and name not in (STEP_OF_TORCH, STEP) and not COLLECTIVE.match(name) and not around_a_step
        return name if is_part else None

    def _is_input(self, event: Host) -> bool:
        part = self.name_of_part(event)
        return bool(_LOADER.search(event.name) or (part and _INPUT_PART.match(part)))

    def _parts(self) -> list[str | None]:
        """The innermost part around every event.

        On a GPU the backward pass runs in a thread of autograd while the thread of the steps waits for it: events there
        belong to the part that waits.
        """
        part: list[str | None] = []
        own: list[int] = []
        for index, event in enumerate(self.events):
            name, above = self.name_of_part(event), self.parent[index]
            outer = part[above] if above != NONE else None
            part.append(self._path(outer, name))
            self.region.append(index if name else self.region[above] if above != NONE else NONE)
            if name and event.thread == self.thread:
                own.append(index)
        autograd = {event.thread for event in self.events if event.name.startswith(_AUTOGRAD)} - {self.thread}
        if autograd:
            waiting = Innermost((self.events[index] for index in own), self.rounding)
            for index, event in enumerate(self.events):
                if event.thread in autograd and (self.foreign or part[index] is None):
                    at = waiting.index(event.start)
                    # Events are ordered by time within a thread, so `own` has the order of `waiting`.
                    part[index] = self._path(part[own[at]] if at != NONE else None, part[index])
        return part

    def _path(self, outer: str | None, name: str | None) -> str | None:
        return f"{outer}/{name}" if outer and name and self.foreign else name or outer


class Innermost:
    """Finds the innermost of some nested events of one thread at a time."""

    def __init__(self, events: Iterable[Host], rounding: float = ROUNDING) -> None:
        self.events = sorted(events, key=lambda event: (event.start, -event.end))
        self.parent = _parents(self.events, rounding)
        self.starts = [event.start for event in self.events]

    def index(self, time: float) -> int:
        index = bisect_right(self.starts, time) - 1
        while index != NONE and self.events[index].end < time:
            index = self.parent[index]
        return index

    def at(self, time: float) -> Host | None:
        index = self.index(time)
        return None if index == NONE else self.events[index]


def _parents(events: list[Host], rounding: float) -> list[int]:
    """The index of the enclosing event, for events ordered by thread, start and descending end."""
    parent: list[int] = []
    stack: list[int] = []
    for index, event in enumerate(events):
        while stack and not holds(events[stack[-1]], event, rounding):
            stack.pop()
        parent.append(stack[-1] if stack else NONE)
        stack.append(index)
    return parent


def holds(outer: Host, inner: Host, rounding: float) -> bool:
    return outer.thread == inner.thread and outer.end > inner.start and outer.end + rounding >= inner.end


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of time intervals, as disjoint intervals in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif end > start:
            union.append((start, end))
    return union


def between(begin: float, end: float, intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The time from `begin` to `end` that is in none of the intervals."""
    edges = [begin, *(min(max(time, begin), end) for interval in merged(intervals) for time in interval), end]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2]) if stop > start]


class Cover:
    """How much of an interval some disjoint intervals cover."""

    def __init__(self, intervals: list[tuple[float, float]]) -> None:
        self.intervals = intervals
        self.starts = [start for start, _ in intervals]
        self.before = [0.0]
        for start, end in intervals:
            self.before.append(self.before[-1] + end - start)

    def until(self, time: float) -> float:
        index = bisect_right(self.starts, time)
        if not index:
            return 0.0
        start, end = self.intervals[index - 1]
        return self.before[index - 1] + min(end, time) - start

    def of(self, start: float, end: float) -> float:
        return self.until(end) - self.until(start) if end > start else 0.0


class TracedSteps:
    """Begins when the first step has begun and the device has finished earlier work; ends when the last step and its
    device work have ended. So it is as long as the steps took, however far the host ran ahead.
    """

    def __init__(self, trace: Trace, nesting: Nesting, only: Collection[int] | None = None) -> None:
        """`only` are the numbers of the steps to look at, in a trace without a device; otherwise all of them."""
        self.nesting = nesting
        times = [(event.start, event.end) for event in (*nesting.steps, *(() if nesting.steps else trace.host))]
        if not nesting.steps:
            times += [(work.start, work.end) for work in trace.device]
            times = [(min(start for start, _ in times), max(end for _, end in times))]
        steps = [step for number, step in enumerate(times) if only is None or number in only]
        self.named = bool(nesting.steps)
        self.steps_from = nesting.steps_from if nesting.steps else "whole trace"
        self.count = len(steps)
        self.host_us = sum(end - start for start, end in steps)
        self.steps, self._starts = steps, [start for start, _ in steps]
        self.work: list[TracedDevice] = []
        """Device work that the steps launched, on every device, in order of time."""
        begin, end = steps[0][0], steps[-1][1]
        device = sorted(trace.device, key=lambda work: (work.start, work.end))
        for work in device:
            at = self._launched(work)
            if self.holds(at):
                self.work.append(work)
                end = max(end, work.end)
            elif at < steps[0][0]:
                begin = max(begin, work.end)
        self.begin, self.end = min(begin, end), end
        busy: Counter[int] = Counter()
        for work in self.work:
            busy[work.device] += max(1, round(1e3 * (work.end - work.start)))
        self.device = busy.most_common(1)[0][0] if busy else None
        self.activity = [
            work for work in device if work.device == self.device and work.end > self.begin and work.start < self.end
        ]
        """Everything the busiest device did in the window, whoever launched it."""
        self._first: dict[int, TracedDevice] = {}
        for work in self.work:
            if work.correlation is not None:
                self._first.setdefault(work.correlation, work)

    def step(self, time: float) -> int:
        """The number of the step that a host time lies in, or NONE."""
        index = bisect_right(self._starts, time) - 1
        return index if index >= 0 and time <= self.steps[index][1] else NONE

    def holds(self, time: float) -> bool:
        """Whether a host time lies inside a step."""
        return self.step(time) != NONE

    def step_of(self, work: TracedDevice) -> int:
        """The step that launched device work."""
        return self.step(self._launched(work))

    def delay(self, work: TracedDevice) -> float | None:
        """Time from the end of the launch call to the start of the work. Only the first work of a call has one: the
        other kernels of a graph wait for their predecessors."""
        call = self.nesting.launch(work)
        if call == NONE or self.first_of_launch(work) is not work:
            return None
        return max(0.0, work.start - self.nesting.events[call].end)

    def first_of_launch(self, work: TracedDevice) -> TracedDevice:
        return work if work.correlation is None else self._first.get(work.correlation, work)

    def step_ms(self) -> list[float]:
        """The time of every step. Device work that outlasts its step belongs to it, and the next step begins later."""
        ends = [end for _, end in self.steps]
        for work in self.work:
            step = self.step_of(work)
            ends[step] = max(ends[step], work.end)
        times, before = [], self.begin
        for (start, _), end in zip(self.steps, ends):
            # A host that runs ahead begins a step while the device still works on the one before.
            begin = max(before, start)
            times.append(max(0.0, end - begin) / 1e3)
            before = max(end, begin)
        return times

    def summary(self) -> Window:
        return Window(
            steps=self.count,
            named=self.named,
            steps_from=self.steps_from,
            wall_ms=(self.end - self.begin) / 1e3 / self.count,
            host_ms=self.host_us / 1e3 / self.count,
            devices=len({work.device for work in self.work}),
            device=self.device,
        )

    def _launched(self, work: TracedDevice) -> float:
        origin = self.nesting.origin(work)
        return work.start if origin == NONE else self.nesting.events[origin].start


def per_step(count: int, steps: int) -> int | float:
    """A count per step, as an integer where it divides evenly."""
    return count // steps if count % steps == 0 else count / steps


def spread(values: list[float]) -> Percentiles:
    """p20, p50 and p80; the values themselves where there are too few for a spread."""
    if len(values) < 2:
        return Percentiles(*[values[0] if values else 0.0] * 3)
    cuts = quantiles(values, n=10, method="inclusive")
    return Percentiles(cuts[1], cuts[4], cuts[7])
