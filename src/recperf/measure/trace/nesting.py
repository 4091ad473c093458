"""The nesting of host events, and which of them launched each piece of device work."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from .read import STEP_OF_TORCH, Device, Host, Trace

ROUNDING = 0.002
"""Microseconds by which a child may seem to outlast its parent: files have three decimals."""
WHOLE = 1.0
"""The same in files of old profilers, which have whole microseconds."""
NONE = -1
_AUTOGRAD = "autograd::"
_INPUT_PART = re.compile(r"(?:.*_)?data$")
_LOADER = re.compile(r"enumerate\(DataLoader\)|DataLoader.*__next__")
"""Names of the range that torch records around its own loader."""


class Nesting:
    """Host events ordered by thread and time, each with the event that encloses it."""

    def __init__(self, trace: Trace, *, steps_name: str, parts_prefix: str) -> None:
        self.prefix = parts_prefix
        self.events = sorted(trace.host, key=lambda event: (event.thread, event.start, -event.end))
        self.rounding = _rounding(self.events)
        self.parent = _parents(self.events, self.rounding)
        self.steps = find_steps(trace.host, steps_name)
        self.thread = self.steps[0].thread if self.steps else _busiest_thread(self.events)
        self.part = self._parts()
        self.inputs = merged((event.start, event.end) for event in self.events if self._is_input(event))
        self._calls: dict[int, int] = {}
        self._ops: dict[int, int] = {}
        for index, event in enumerate(self.events):
            if event.kind == "call" and event.correlation is not None:
                self._calls.setdefault(event.correlation, index)
            elif event.external is not None and event.kind == "op":
                self._ops[event.external] = index

    def launch(self, work: Device) -> int:
        """The call that launched device work, or NONE."""
        return NONE if work.correlation is None else self._calls.get(work.correlation, NONE)

    def origin(self, work: Device) -> int:
        """That call, else the operator that the device work names, else NONE."""
        call = self.launch(work)
        return call if call != NONE or work.external is None else self._ops.get(work.external, NONE)

    def above(self, index: int, kind: str) -> int:
        """The nearest event of a kind at or above this one, or NONE."""
        while index != NONE and self.events[index].kind != kind:
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
        inside = event.kind == "range" and event.name.startswith(self.prefix)
        return event.name[len(self.prefix) :] if inside else None

    def _is_input(self, event: Host) -> bool:
        part = self.name_of_part(event)
        waits = _INPUT_PART.match(part) if part else event.kind != "call" and _LOADER.search(event.name)
        return bool(waits) and event.thread == self.thread

    def _parts(self) -> list[str | None]:
        """The innermost part around every event.

        On a GPU the backward pass runs in a thread of autograd while the thread of the steps waits for it: events there
        belong to the part that waits.
        """
        part: list[str | None] = []
        for index, event in enumerate(self.events):
            above = part[self.parent[index]] if self.parent[index] != NONE else None
            part.append(self.name_of_part(event) or above)
        autograd = {event.thread for event in self.events if event.name.startswith(_AUTOGRAD)} - {self.thread}
        if autograd:
            own = (event for event in self.events if event.thread == self.thread and self.name_of_part(event))
            waiting = Innermost(own, self.rounding)
            for index, event in enumerate(self.events):
                if part[index] is None and event.thread in autograd:
                    outer = waiting.at(event.start)
                    part[index] = self.name_of_part(outer) if outer else None
        return part


class Innermost:
    """Finds the innermost of some nested events of one thread at a time."""

    def __init__(self, events: Iterable[Host], rounding: float = ROUNDING) -> None:
        self.events = sorted(events, key=lambda event: (event.start, -event.end))
        self.parent = _parents(self.events, rounding)
        self.starts = [event.start for event in self.events]

    def at(self, time: float) -> Host | None:
        index = bisect_right(self.starts, time) - 1
        while index != NONE and self.events[index].end < time:
            index = self.parent[index]
        return None if index == NONE else self.events[index]


def _rounding(events: list[Host]) -> float:
    return WHOLE if all(event.start.is_integer() and event.end.is_integer() for event in events) else ROUNDING


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


def find_steps(host: Iterable[Host], steps_name: str) -> list[Host]:
    """The steps in order of time, of the thread that has most of them; ours are preferred to torch's own."""
    for name in (steps_name, STEP_OF_TORCH):
        threads: defaultdict[str, list[Host]] = defaultdict(list)
        pattern = re.compile(re.escape(name) + r"#\d+$")
        for event in host:
            if event.kind == "range" and pattern.match(event.name):
                threads[event.thread].append(event)
        if threads:
            most = max(threads, key=lambda thread: len(threads[thread]))
            return sorted(threads[most], key=lambda event: event.start)
    return []


def _busiest_thread(events: list[Host]) -> str:
    time: defaultdict[str, float] = defaultdict(float)
    for event in events:
        time[event.thread] += event.end - event.start
    return max(time, key=lambda thread: time[thread]) if time else ""


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of time intervals, as disjoint intervals in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif end > start:
            union.append((start, end))
    return union


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
