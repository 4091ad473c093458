"""Where the time of traced steps goes: to each operator without the operators inside it, and to no operator at all; and
rows of figures about these operators, as attribution.py divides and profile.json keeps them.

The trace of a CPU step is divided by the thread that runs the steps. Its waits for other threads of the program count
for the operators that those threads run meanwhile. The trace of a GPU step is divided by what the device does.
Torch-free.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from ..units import time as time_text
from .operators import COLLECTIVE, TABLE_BATCHED, CallWork, kind_of_call, limit_of_kernel
from .records import Operator, Place
from .spans import EXCHANGE
from .trace.collectives import collectives
from .trace.idle import DeviceTimes
from .trace.nesting import NONE, Cover, Nesting, between, merged
from .trace.read import OWN_RANGES, Trace
from .trace.window import TracedSteps
from .trace.work import work_of

GRAPH = "CUDA graph"
COUNTED = ("flops", "special", "bytes", "beyond", "fresh", "rows", "missed", "distinct", "linked")
"""The counted work of an operator."""
FUSED = ("CompiledFxGraph", "Torch-Compiled Region", "triton_")
"""Parts of the names under which the work of fused operators appears."""
LONG_US = 500.0
"""Python without an operator for this time is seen by the sampler, at its own line."""
OUTLIER = 4.0
"""A call that took this many times the median of its like was interrupted."""
NOTICEABLE = 0.02
"""Share of the operators' time from which those with unknown work are listed."""
NODE = "autograd::engine::evaluate_function"
_CPP_NODE = "torch::autograd::CppNode<"
"""Begins the name of a backward pass in C++. The operators that it runs may not be visible."""
WAITING = re.compile(r"<built-in.*(?:sleep|acquire|select|poll|epoll|\bwait\b|\brecv|\bread\b|fsync)")
"""Built-in functions in which a thread is off the processor."""


@dataclass(slots=True)
class Call:
    """An operator in a traced step with the time it took itself."""

    name: str
    part: str | None
    us: float
    work: CallWork | None
    python: bool
    """Whether Python called it, not another operator."""
    index: int
    """Its event, or NONE."""
    kernels: int = 0
    """Kernels that it launched."""
    beside: bool = False
    """Whether another thread ran it while the steps' thread waited."""
    parallel: float = 1.0
    """How many such operators ran at the same time: it took that much longer than its share of the step."""
    place: Place | None = None
    row: Operator | None = None
    """The row of figures that it belongs to."""


@dataclass(slots=True)
class StepTimes:
    """Times of all traced steps in us."""

    steps: int
    calls: list[Call] = field(default_factory=list)
    outside_us: float = 0.0
    """Time of the steps' thread outside of operators and of all waits that are known from the trace."""
    long_us: float = 0.0
    """Of it, in stretches of at least `LONG_US`."""
    optimizer_us: dict[str, float] = field(default_factory=dict)
    """Of it, inside the methods of optimizers."""
    beside_us: float = 0.0
    """Time in which only other threads of the program ran operators."""
    input_us: float = 0.0
    communication_us: float = 0.0
    """Time in which only collectives ran."""
    blocked_us: float = 0.0
    """Time in functions that wait, in a trace with stacks."""
    host: list[Call] = field(default_factory=list)
    """The calls with the times of the host, where `calls` has those of a device."""
    by_origin: dict[int, Call] = field(default_factory=dict)
    """The call that device work belongs to, by the event that launched it."""
    by_kernel: dict[str, Call] = field(default_factory=dict)
    """The same for kernels of CUDA graphs, by their name."""

    def on_device(self, nesting: Nesting, device: DeviceTimes, graph_works: dict[str, CallWork]) -> None:
        """Replace the host's times by those of the device, each for the nearest call at or above its launch.

        `graph_works` is the work of a launch by the name of a kernel, for kernels of CUDA graphs, which no operator
        launched.
        """
        owner = nearest_call(nesting, self.calls)
        us: defaultdict[int, float] = defaultdict(float)
        extra: list[Call] = []
        for origin, (time, kernels) in device.by_origin.items():
            call = owner(origin)
            if call is None:
                name = nesting.events[origin].name if origin != NONE else "(launched by no operator of the steps)"
                call = Call(name, None, 0.0, None, False, NONE)
                extra.append(call)
            us[id(call)] += time
            call.kernels += kernels
            self.by_origin[origin] = call
        for name, (time, kernels) in device.graph.items():
            work = graph_works.get(name)
            whole = work and replace(work, **{figure: kernels * getattr(work, figure) for figure in COUNTED})
            extra.append(Call(name, GRAPH, 0.0, whole, False, NONE, kernels))
            us[id(extra[-1])] = time
            self.by_kernel[name] = extra[-1]
        self.host = self.calls
        self.calls = [call for call in [*self.calls, *extra] if us[id(call)] > 0]
        for call in self.calls:
            call.us = us[id(call)]


def nearest_call(nesting: Nesting, calls: list[Call]) -> Callable[[int], Call | None]:
    """A function from an event to the nearest call at or above it."""
    by_event = {call.index: call for call in calls}

    def owner(index: int) -> Call | None:
        while index != NONE and index not in by_event:
            index = nesting.parent[index]
        return by_event.get(index) if index != NONE else None

    return owner


def step_times(
    trace: Trace,
    nesting: Nesting,
    window: TracedSteps,
    work_at: Callable[[int, bool], CallWork | None],
    part_of: Callable[[int], str | None],
    event_us: float = 0.0,
) -> StepTimes:
    """Divide the steps' thread among operators; `event_us` is what recording one event costs.

    `work_at` returns the work of an event, given whether it is inside one with known work, and is asked in the order of
    time. An operator without work of its own inside one with known work belongs to that.
    """
    times = StepTimes(window.count)
    events, parent = nesting.events, nesting.parent
    owner: dict[int, Call] = {}
    top: list[tuple[float, float]] = []
    beside: list[Call] = []
    for index in sorted(range(len(events)), key=lambda index: events[index].start):
        event = events[index]
        if event.kind != "op" or not window.holds(event.start):
            continue
        above = nesting.above(parent[index], "op")
        outer = owner.get(above) if above != NONE else None
        length = event.end - event.start
        inside = outer is not None and outer.work is not None and not outer.name.startswith((NODE, _CPP_NODE))
        work = work_at(index, inside)
        if outer is not None and inside and work is None:
            # Belongs to an operator whose work is counted as a whole; only the cost of recording it is taken out.
            outer.us -= event_us
            owner[index] = outer
            continue
        call = owner[index] = Call(event.name, part_of(index), length, work, above == NONE, index)
        times.calls.append(call)
        if outer is not None:
            outer.us -= length + event_us
        elif event.thread == nesting.thread:
            top.append((event.start, event.end))
        if event.thread != nesting.thread:
            call.beside = True
            beside.append(call)
    _outside(times, trace, nesting, window, top, beside, event_us)
    for call in times.calls:
        call.us = max(0.0, call.us)
    return times


def _outside(
    times: StepTimes,
    trace: Trace,
    nesting: Nesting,
    window: TracedSteps,
    top: list[tuple[float, float]],
    beside: list[Call],
    event_us: float,
) -> None:
    """Time outside of the operators of the steps' thread: for what it waited meanwhile, where that is known."""
    events = nesting.events
    ranges = [event for event in events if event.kind == "range" and event.thread == nesting.thread]
    exchanges = ((event.start, event.end) for event in ranges if event.name.endswith(EXCHANGE))
    inputs = [(start, end) for start, end in nesting.inputs if window.holds(start)]
    within = merged([*inputs, *(stretch for stretch in exchanges if window.holds(stretch[0]))])
    times.input_us = sum(end - start for start, end in inputs)
    # Operators inside the loader belong to the wait for input, those inside an exchange to the wait for ranks.
    spent = Cover(within)
    times.calls = [call for call in times.calls if not spent.of(events[call.index].start, events[call.index].end)]
    covered = merged([*top, *within])
    # Recording a range takes as long as recording an operator; most of the ranges of a step are outside of operators.
    recorded = len(top) + sum(event.name.startswith(OWN_RANGES) and window.holds(event.start) for event in ranges)
    outside = window.host_us - sum(end - start for start, end in covered) - event_us * recorded

    def uncovered(stretches: list[tuple[float, float]]) -> float:
        """Time of these stretches that is not covered yet; from now on it is."""
        nonlocal covered
        before = Cover(covered)
        covered = merged([*covered, *stretches])
        return sum(end - start - before.of(start, end) for start, end in merged(stretches))

    times.communication_us = uncovered([(item.start, item.end) for item in collectives(nesting, window)])
    main = Cover(covered)
    for call in beside:
        start, end = events[call.index].start, events[call.index].end
        call.us *= 1 - main.of(start, end) / max(1e-9, end - start)
    times.beside_us = uncovered([(events[call.index].start, events[call.index].end) for call in beside])
    together = sum(call.us for call in beside) / times.beside_us if times.beside_us else 1.0
    for call in beside:
        call.us /= together or 1.0
        call.parallel = max(1.0, together)
    waiting = (event for event in trace.python if event.thread == nesting.thread and WAITING.match(event.name))
    times.blocked_us = uncovered([(event.start, event.end) for event in waiting if window.holds(event.start)])
    known = times.communication_us + times.beside_us + times.blocked_us
    times.outside_us = max(0.0, max(0.0, outside) - known)
    stretches = (end - start for step in window.steps for start, end in between(*step, covered))
    times.long_us = min(times.outside_us, sum(length for length in stretches if length >= LONG_US))
    inside = Cover(covered)
    for event in ranges:
        if event.name.startswith("Optimizer.") and window.holds(event.start):
            python = event.end - event.start - inside.of(event.start, event.end)
            times.optimizer_us[event.name] = times.optimizer_us.get(event.name, 0.0) + python


class CountedInOrder:
    """Matches counted calls with the events of a trace by the name of the operator, in the order of each step.

    Where a step has another number of calls than was counted, the last one stands for those that are missing.
    Operators of threads that the counting did not see have the work that follows from their sizes.
    """

    def __init__(self, nesting: Nesting, works: Sequence[CallWork]) -> None:
        self._nesting = nesting
        self._works: defaultdict[str, list[CallWork]] = defaultdict(list)
        for work in works:
            self._works[work.name].append(work)
        # A lookup that a library does not divide into operators has a backward pass that updates the same rows.
        lookups = [work for work in works if TABLE_BATCHED.match(work.name) and "lookup" in work.name and work.rows]
        self._backward = [
            replace(work, rows=2 * work.distinct, bytes=2 * work.distinct * work.row_bytes, beyond=0, fresh=0)
            for work in reversed(lookups)
        ]
        self._next: defaultdict[str, int] = defaultdict(int)
        self._starts = [step.start for step in nesting.steps]
        self._step = -1

    def __call__(self, index: int, inside: bool) -> CallWork | None:
        if inside:
            return None
        event = self._nesting.events[index]
        main = event.thread == self._nesting.thread
        step = bisect_left(self._starts, event.start + 1e-9)
        if main and step != self._step:
            self._step = step
            self._next.clear()
        hidden = event.name.startswith(_CPP_NODE) and "LookupFunction" in event.name
        works = self._backward if hidden else self._works.get(event.name)
        if not works:
            return None if main else work_of(event.name, event.shapes)
        place = self._next[event.name]
        self._next[event.name] += 1
        return works[min(place, len(works) - 1)]


def operator_rows(times: StepTimes, works: list[CallWork]) -> list[Operator]:
    """Operators per step, those of equal name, part and size of work together; `works` are the counted calls of a
    step."""
    fused = _fused(times, works)
    table = []
    for (name, part, *_), members in _groups(times, fused).items():
        counted = [work for _, work in members if work is not None and work.known]
        row = Operator(
            name=name,
            part=part,
            kind=kind_of_call(name),
            calls=len(members) / times.steps,
            python_calls=sum(call.python for call, _ in members) / times.steps,
            ms=sum(call.us for call, _ in members) / 1e3 / times.steps,
            kernels=sum(call.kernels for call, _ in members) / times.steps,
            by_name=limit_of_kernel(name) if part == GRAPH else None,
            communication=bool(COLLECTIVE.match(name)),
            place=_place(call for call, _ in members),
            parallel=max(call.parallel for call, _ in members),
            counted=len(counted) == len(members),
            fused=any(id(call) in fused for call, _ in members),
            largest=list(counted[0].largest) if counted and counted[0].largest else None,
        )
        for figure in COUNTED:
            setattr(row, figure, sum(getattr(work, figure) for work in counted) / times.steps)
        for fact in ("precision", "row_bytes", "table_rows"):
            setattr(row, fact, next((getattr(work, fact) for work in counted if getattr(work, fact)), None))
        for call, _ in members:
            call.row = row
        table.append(row)
    return sorted(table, key=lambda row: -row.ms)


def unknown_work(operators: list[Operator]) -> list[str]:
    """A note on the operators whose work is not known, where they take a noticeable part of the operators' time."""
    unknown: defaultdict[str, float] = defaultdict(float)
    for row in operators:
        if not row.counted and not row.communication and row.kind not in ("function", "node", "view"):
            unknown[row.name] += row.ms
    names = sorted(unknown, key=lambda name: -unknown[name])
    names = [name for name in names if unknown[name] >= NOTICEABLE * sum(row.ms for row in operators)]
    if not names:
        return []
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    count = f"{len(names)} operators" if len(names) > 1 else "one operator"
    return [f"the work of {count} is not known: {listed} ({time_text(sum(map(unknown.__getitem__, names)))})"]


def _place(calls: Iterable[Call]) -> Place | None:
    """The place with most of the calls' time."""
    times: defaultdict[Place, float] = defaultdict(float)
    for call in calls:
        if call.place is not None:
            times[call.place] += call.us
    return max(times, key=lambda place: times[place], default=None)


def clip(times: StepTimes) -> float:
    """Cut calls that took many times as long as others of the same work: other work had their core meanwhile. Returns
    the us that were cut."""
    cut = 0.0
    for members in _groups(times, {}).values():
        if len(members) >= 3:
            most = OUTLIER * median(call.us for call, _ in members)
            for call, _ in members:
                cut += max(0.0, call.us - most)
                call.us = min(call.us, most)
    return cut


def _groups(times: StepTimes, fused: dict[int, CallWork]) -> dict[tuple[Any, ...], list[tuple[Call, Any]]]:
    """Calls of equal name, part and size of work."""
    groups: defaultdict[tuple[Any, ...], list[tuple[Call, Any]]] = defaultdict(list)
    for call in times.calls:
        work = call.work or fused.get(id(call))
        sizes = (int(getattr(work, name, 0)).bit_length() for name in ("flops", "bytes", "beyond", "rows"))
        groups[call.name, call.part, getattr(work, "largest", ()), *sizes].append((call, work))
    return groups


def _fused(times: StepTimes, works: list[CallWork]) -> dict[int, CallWork]:
    """The work of operators that were counted but that the trace does not show: a compiler fused them."""
    regions = [call for call in times.calls if any(mark in call.name for mark in FUSED)]
    if not regions:
        return {}
    shown = {call.name for call in times.calls}
    hidden = [work for work in works if work.name not in shown]
    whole = sum(call.us for call in regions) or 1.0
    result = {}
    for call in regions:
        share = call.us / whole * times.steps
        work = CallWork(call.name)
        for figure in ("flops", "special", "bytes", "beyond", "rows", "missed"):
            setattr(work, figure, round(share * sum(getattr(item, figure) for item in hidden)))
        work.row_bytes = max((item.row_bytes for item in hidden), default=0)
        result[id(call)] = work
    return result
