"""Where the time of traced steps goes: to each operator without the operators inside it, and to no operator at all; and
one of the steps in lanes, as a page draws it.

The trace of a CPU step is divided by the thread that runs the steps. Its waits for other threads of the program count
for the operators that those threads run meanwhile. The trace of a GPU step is divided by what the device does.
In lanes, times are those of the trace, which slows the host. An operator is drawn over the one that called it, so that
what remains visible of that is its own time. Torch-free.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from .operators import TABLE_BATCHED, CallWork
from .records import Operator, Place, TracedCall, TracedStep
from .spans import EXCHANGE
from .trace.idle import DeviceTimes, collectives, limit_of_work, waits_for_device
from .trace.nesting import NONE, Cover, Nesting, TracedSteps, between, merged
from .trace.read import OWN_RANGES, Trace, grouped
from .trace.work import work_of

GRAPH = "CUDA graph"
COUNTED = (
    "flops",
    "special",
    "bytes",
    "memory_bytes",
    "new_bytes",
    "rows",
    "memory_rows",
    "distinct",
    "host_bytes",
)
"""The counted work of an operator."""
LONG_US = 500.0
"""Python without an operator for this time is seen by the sampler, at its own line."""
NODE = "autograd::engine::evaluate_function"
_CPP_NODE = "torch::autograd::CppNode<"
"""Begins the name of a backward pass in C++. The operators that it runs may not be visible."""
WAITING = re.compile(r"<built-in.*(?:sleep|acquire|select|poll|epoll|\bwait\b|\brecv|\bread\b|fsync)")
"""Built-in functions in which a thread is off the processor."""
INPUT, HOST, OTHERS, DEVICE = "input", "host", "other threads", "device"
MOST = 400
"""Calls that are stored one by one, the longest."""
SLICES = 200
"""Parts of a step; shorter calls that begin in the same one are joined."""


@dataclass(slots=True)
class OperatorCall:
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
    calls: list[OperatorCall] = field(default_factory=list)
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
    host: list[OperatorCall] = field(default_factory=list)
    """The calls with the times of the host, where `calls` has those of a device."""
    by_origin: dict[int, OperatorCall] = field(default_factory=dict)
    """The call that device work belongs to, by the event that launched it."""
    by_kernel: dict[str, OperatorCall] = field(default_factory=dict)
    """The same for kernels of CUDA graphs, by their name."""

    def on_device(self, nesting: Nesting, device: DeviceTimes, graph_works: dict[str, CallWork]) -> None:
        """Replace the host's times by those of the device, each for the nearest call at or above its launch.

        `graph_works` is the work of a launch by the name of a kernel, for kernels of CUDA graphs, which no operator
        launched.
        """
        owner = nearest_call(nesting, self.calls)
        us: defaultdict[int, float] = defaultdict(float)
        extra: list[OperatorCall] = []
        for origin, (time, kernels) in device.by_origin.items():
            call = owner(origin)
            if call is None:
                name = nesting.events[origin].name if origin != NONE else "(launched by no operator of the steps)"
                call = OperatorCall(name, None, 0.0, None, False, NONE)
                extra.append(call)
            us[id(call)] += time
            call.kernels += kernels
            self.by_origin[origin] = call
        for name, (time, kernels) in device.graph.items():
            work = graph_works.get(name)
            whole = work and replace(work, **{figure: kernels * getattr(work, figure) for figure in COUNTED})
            extra.append(OperatorCall(name, GRAPH, 0.0, whole, False, NONE, kernels))
            us[id(extra[-1])] = time
            self.by_kernel[name] = extra[-1]
        self.host = self.calls
        self.calls = [call for call in [*self.calls, *extra] if us[id(call)] > 0]
        for call in self.calls:
            call.us = us[id(call)]


def nearest_call(nesting: Nesting, calls: list[OperatorCall]) -> Callable[[int], OperatorCall | None]:
    """A function from an event to the nearest call at or above it."""
    by_event = {call.index: call for call in calls}

    def owner(index: int) -> OperatorCall | None:
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
    owner: dict[int, OperatorCall] = {}
    top: list[tuple[float, float]] = []
    beside: list[OperatorCall] = []
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
        call = owner[index] = OperatorCall(event.name, part_of(index), length, work, above == NONE, index)
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
    beside: list[OperatorCall],
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
        self._works = grouped(works, lambda work: work.name)
        # A lookup that a library does not divide into operators has a backward pass that updates the same rows.
        lookups = [work for work in works if TABLE_BATCHED.match(work.name) and "lookup" in work.name and work.rows]
        self._backward = [
            replace(
                work,
                rows=2 * work.distinct,
                bytes=2 * work.distinct * work.row_bytes,
                memory_bytes=0,
                new_bytes=0,
            )
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


def traced_step(nesting: Nesting, window: TracedSteps, times: StepTimes, operators: list[Operator]) -> TracedStep:
    """The median step of a trace; `operators` are the rows that its calls belong to."""
    lengths = window.step_ms()
    number = sorted(range(len(lengths)), key=lambda one: lengths[one])[len(lengths) // 2]
    begin, end = window.steps[number]
    end = max([end, *(work.end for work in window.work if window.step_of(work) == number)])
    rows = {id(row): index for index, row in enumerate(operators)}
    calls = [
        replace(call, start_us=max(call.start_us, begin) - begin, us=until - max(call.start_us, begin))
        for call in _calls(nesting, window, times, rows)
        if (until := min(call.start_us + call.us, end)) > max(call.start_us, begin)
    ]
    return TracedStep(end - begin, _bounded(calls, end - begin))


def _calls(nesting: Nesting, window: TracedSteps, times: StepTimes, rows: dict[int, int]) -> Iterator[TracedCall]:
    """Everything that the trace shows, in the time of the trace."""
    events = nesting.events

    def row(call: OperatorCall | None) -> int | None:
        return rows.get(id(call.row)) if call else None

    for start, stop in nesting.inputs:
        yield TracedCall(INPUT, start, stop - start, name="wait for input", limit="input")
    for call in times.host or times.calls:
        if call.index != NONE:
            event = events[call.index]
            lane, operator = HOST if event.thread == nesting.thread else OTHERS, row(call)
            name = "" if operator is not None else call.name
            yield TracedCall(lane, event.start, event.end - event.start, operator, name)
    for index in waits_for_device(nesting, window):
        event = events[index]
        yield TracedCall(HOST, event.start, event.end - event.start, name=event.name, limit="sync")
    if not window.work:
        for item in collectives(nesting, window):
            yield TracedCall(OTHERS, item.start, item.end - item.start, name=item.name, limit="communication")
    for work in window.activity:
        origin = nesting.above(nesting.origin(work), "op")
        limit = limit_of_work(work)
        operator = None if limit else row(times.by_kernel.get(work.name) or times.by_origin.get(origin))
        yield TracedCall(DEVICE, work.start, work.end - work.start, operator, work.name, limit)


def _bounded(calls: list[TracedCall], whole: float) -> list[TracedCall]:
    """The longest calls, and the others merged; each lane in the order in which it is drawn."""
    ordered = sorted(calls, key=lambda call: -call.us)
    groups = grouped(ordered[MOST:], lambda call: (call.lane, int(SLICES * call.start_us / whole)))
    joined = map(_joined_calls, groups.values())
    return sorted([*ordered[:MOST], *joined], key=lambda call: (call.lane, call.start_us, -call.us))


def _joined_calls(group: list[TracedCall]) -> TracedCall:
    """Calls of one slice as one that takes as long as they cover, with the limit of the longest."""
    longest = group[0]
    if len(group) == 1:
        return longest
    covered = sum(end - start for start, end in merged((call.start_us, call.start_us + call.us) for call in group))
    start = min(call.start_us for call in group)
    return replace(longest, start_us=start, us=covered, name=f"{len(group)} short calls")
