"""Where the time of traced steps goes: to each operator without the operators inside it, and to no operator at all.

The trace of a CPU step is divided by the thread that runs the steps. Its waits for other threads of the program count
for the operators that those threads run meanwhile. The trace of a GPU step is divided by what the device does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .spans import EXCHANGE
from .trace.nesting import NONE, Cover, Nesting, merged
from .trace.read import OWN_RANGES, Host
from .trace.window import Window

_NODE = "autograd::engine::evaluate_function"


class Counted(Protocol):
    """Counted work of a call, found by the name of its operator."""

    name: str


@dataclass(slots=True)
class Call:
    """An operator in a traced step with the time it took itself."""

    name: str
    part: str | None
    us: float
    work: Counted | None
    python: bool
    """Whether Python called it, not another operator."""
    event: Host
    device_us: float = 0.0
    """Time of the device on what it launched, alone or its part of what ran at the same time."""
    kernels: int = 0
    beside: bool = False
    """Whether another thread ran it while the steps' thread waited."""
    parallel: float = 1.0
    """How many such operators ran at the same time: it took that much longer than its share of the step."""


@dataclass(slots=True)
class StepTimes:
    """Times of all traced steps in us."""

    steps: int
    calls: list[Call] = field(default_factory=list)
    outside_us: float = 0.0
    """Time of the steps' thread outside of operators and of waits for input and for other ranks."""
    beside_us: float = 0.0
    """Part of `outside_us` in which other threads of the program ran operators."""
    events: int = 0
    """Events whose recording slowed the steps."""


def step_times(
    nesting: Nesting, window: Window, works: Sequence[Counted], part_of: Callable[[int], str | None], event_us: float
) -> StepTimes:
    """Divide the steps' thread among operators; `event_us` is what recording one event costs.

    Counted work is matched with events of the same name in the same order, from the outside in: an operator inside one
    with counted work belongs to it.
    """
    times = StepTimes(window.count)
    events, parent = nesting.events, nesting.parent
    queues = _Queues(works)
    owner: dict[int, Call | None] = {}
    top: list[tuple[float, float]] = []
    beside: list[tuple[Call, float, float]] = []
    starts = [step.start for step in nesting.steps]
    current_step = -1
    for index in sorted(range(len(events)), key=lambda index: events[index].start):
        event = events[index]
        if event.kind != "op" or not window.holds(event.start):
            continue
        main = event.thread == nesting.thread
        step = bisect_left(starts, event.start + 1e-9) if starts else 0
        if main and step != current_step:
            current_step = step
            queues.restart()
        above = nesting.above(parent[index], "op")
        outer = owner.get(above) if above != NONE else None
        times.events += main
        length = event.end - event.start
        if outer is not None and outer.work is not None and not outer.event.name.startswith(_NODE):
            # Belongs to an operator whose work is counted as a whole; only the cost of recording it is taken out.
            outer.us -= event_us
            owner[index] = outer
            continue
        call = Call(event.name, part_of(index), length, queues.next(event.name), above == NONE, event)
        owner[index] = call
        times.calls.append(call)
        if outer is not None:
            outer.us -= length + event_us
        elif main:
            top.append((event.start, event.end))
        if not main:
            call.beside = True
            beside.append((call, event.start, event.end))
    _outside(times, nesting, window, top, beside, event_us)
    for call in times.calls:
        call.us = max(0.0, call.us)
    return times


def _outside(
    times: StepTimes,
    nesting: Nesting,
    window: Window,
    top: list[tuple[float, float]],
    beside: list[tuple[Call, float, float]],
    event_us: float,
) -> None:
    """Time outside of operators, and which of it other threads used for operators."""
    ranges = [event for event in nesting.events if event.kind == "range" and event.thread == nesting.thread]
    exchanges = ((event.start, event.end) for event in ranges if event.name.endswith(EXCHANGE))
    within = [(start, end) for start, end in merged([*nesting.inputs, *exchanges]) if window.holds(start)]
    covered = merged([*top, *within])
    # Operators inside the loader belong to the wait for input, those inside an exchange to the wait for ranks.
    spent = Cover(within)
    times.calls = [call for call in times.calls if not spent.of(call.event.start, call.event.end)]
    busy = sum(end - start for start, end in covered)
    # Recording a range takes as long as recording an operator; most of the ranges of a step are outside of operators.
    recorded = len(top) + sum(event.name.startswith(OWN_RANGES) and window.holds(event.start) for event in ranges)
    times.outside_us = max(0.0, window.host_us - busy - event_us * recorded)
    if not beside:
        return
    main = Cover(covered)
    for call, start, end in beside:
        call.us *= 1 - main.of(start, end) / max(1e-9, end - start)
    union = merged((start, end) for _, start, end in beside)
    times.beside_us = sum(end - start - main.of(start, end) for start, end in union)
    whole = sum(call.us for call, _, _ in beside)
    together = whole / times.beside_us if times.beside_us else 1.0
    for call, _, _ in beside:
        call.us /= together
        call.parallel = max(1.0, together)
    times.outside_us = max(0.0, times.outside_us - times.beside_us)


class _Queues:
    """The counted calls of each operator in order. Where a step has another number of them than was counted, the
    last one stands for those that are missing."""

    def __init__(self, works: Sequence[Counted]) -> None:
        self._works: defaultdict[str, list[Counted]] = defaultdict(list)
        for work in works:
            self._works[work.name].append(work)
        self._next: defaultdict[str, int] = defaultdict(int)

    def restart(self) -> None:
        self._next.clear()

    def next(self, name: str) -> Counted | None:
        works = self._works.get(name)
        if not works:
            return None
        index = self._next[name]
        self._next[name] += 1
        return works[min(index, len(works) - 1)]
