"""Rows of figures about the operators of a step and their places, as attribution.py divides and profile.json keeps
them. Torch-free.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from linecache import getline
from statistics import median
from typing import Any

from msgspec.structs import asdict, replace

from ..units import time as time_text
from .attribution import divided_ms
from .operators import COLLECTIVE, CallWork, kind_of_call, limit_of_kernel
from .places import BACKWARD, Stack, place_in, surrounding
from .records import DividedOperator, NativeCode, Observed, Operator, PartTime, Place, PlaceShare, PlaceTime, Sampling
from .timeline import COUNTED, GRAPH, NODE, WAITING, OperatorCall, StepTimes
from .trace.nesting import NONE, Nesting, TracedSteps, between
from .trace.read import Host, Trace, summed
from .trace.regions import TraceStacks

SMALLEST = 0.005
"""Share of a step from which a place is listed."""
FEWEST = 10
"""Samples that tell which frames surround the step; with fewer, its operators tell."""
FUSED = ("CompiledFxGraph", "Torch-Compiled Region", "triton_")
"""Parts of the names under which the work of fused operators appears."""
OUTLIER = 4.0
"""A call that took this many times the median of its like was interrupted."""
NOTICEABLE = 0.02
"""Share of the operators' time from which those with unknown work are listed."""


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


def part_rows(operators: list[Operator]) -> list[PartTime]:
    """Time of each part, largest first."""
    parts = summed((row.part or "(no part)", row.ms) for row in operators)
    whole = sum(parts.values()) or 1.0
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return [PartTime(name, ms, ms / whole) for name, ms in ordered]


def unknown_work(operators: list[Operator]) -> list[str]:
    """A note on the operators whose work is not known, where they take a noticeable part of the operators' time."""
    rows = (row for row in operators if not row.counted and not row.communication)
    unknown = summed((row.name, row.ms) for row in rows if row.kind not in ("function", "node", "view"))
    names = sorted(unknown, key=lambda name: -unknown[name])
    names = [name for name in names if unknown[name] >= NOTICEABLE * sum(row.ms for row in operators)]
    if not names:
        return []
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    count = f"{len(names)} operators" if len(names) > 1 else "one operator"
    return [f"the work of {count} is not known: {listed} ({time_text(sum(map(unknown.__getitem__, names)))})"]


def _place(calls: Iterable[OperatorCall]) -> Place | None:
    """The place with most of the calls' time."""
    times = summed((call.place, call.us) for call in calls if call.place is not None)
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


def _groups(times: StepTimes, fused: dict[int, CallWork]) -> dict[tuple[Any, ...], list[tuple[OperatorCall, Any]]]:
    """Calls of equal name, part and size of work."""
    groups: defaultdict[tuple[Any, ...], list[tuple[OperatorCall, Any]]] = defaultdict(list)
    for call in times.calls:
        work = call.work or fused.get(id(call))
        sizes = (int(getattr(work, name, 0)).bit_length() for name in ("flops", "bytes", "memory_bytes", "rows"))
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
        for figure in ("flops", "special", "bytes", "memory_bytes", "rows", "memory_rows"):
            setattr(work, figure, round(share * sum(getattr(item, figure) for item in hidden)))
        work.row_bytes = max((item.row_bytes for item in hidden), default=0)
        result[id(call)] = work
    return result


def name_places(
    nesting: Nesting, calls: list[OperatorCall], own: Callable[[OperatorCall, Host], tuple[Place | None, bool]]
) -> None:
    """Set the places of calls. `own` returns the place from which a call was made, and whether only autograd's backward
    pass is inside it: then its operators belong to the lines whose forward pass recorded them."""
    events = nesting.events
    listed = [
        (call, nesting.outer(call.index, NODE), *own(call, events[call.index])) for call in calls if call.index != NONE
    ]
    forward = {events[call.index].sequence: place for call, node, place, _ in listed if node == NONE and place}
    forward.pop(None, None)
    inner: dict[int, Place] = {}
    for call, node, place, backward in reversed(listed):
        source = forward.get(events[node].sequence) if node != NONE else None
        if source and (backward or (place is None and call.index not in inner)):
            place = replace(source, backward=True)
        call.place = place or inner.get(call.index)
        if call.place:
            inner[nesting.above(nesting.parent[call.index], "op")] = call.place


def place_rows(operators: list[DividedOperator], shares: dict[str, float], seen: Observed) -> list[PlaceTime]:
    """The places of a step by limit, largest first; `share` is that of the step. Operators have their own places, other
    time those of `seen`, as shares of their limit."""
    whole = divided_ms(seen.waits, seen.operators)
    times: defaultdict[tuple[Place, str], float] = defaultdict(float)
    for row in operators:
        if row.place and whole:
            for limit, ms in row.limits.items():
                times[row.place, limit] += ms / whole
    for outside in seen.places:
        times[outside.place, outside.limit] += outside.share * shares[outside.limit]
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return [
        PlaceTime(**asdict(place), limit=limit, share=share, ms=share * whole)
        for (place, limit), share in ordered
        if share >= SMALLEST
    ]


def _shares(times: Iterable[tuple[str, Place | None, float]]) -> list[PlaceShare]:
    """Places outside of operators with their shares of a limit, from the time of each."""
    limits: defaultdict[str, defaultdict[Place | None, float]] = defaultdict(lambda: defaultdict(float))
    for limit, place, time in times:
        limits[limit][place] += time
    return [
        PlaceShare(limit, time / sum(places.values()), place, getline(place.file, place.line).strip())
        for limit, places in limits.items()
        for place, time in sorted(places.items(), key=lambda item: -item[1])
        if place and time > 0
    ]


def observer_places(observer: Any) -> Callable[[OperatorCall, Host], tuple[Place | None, bool]]:
    """A function that returns the place of a call of an Observer's counted step, and whether it is in a backward
    pass."""
    around = _around(observer)

    def own(call: OperatorCall, event: Host) -> tuple[Place | None, bool]:
        positions = call.work.stack if call.work else ()
        backward = call.work is not None and positions[:1] in ((), (BACKWARD,))
        return place_in(observer.stacks.stack(positions), around), backward

    return own


def _around(observer: Any) -> Stack:
    """The frames around all of the steps that an Observer saw."""
    stack = observer.stacks.stack
    positions = [sample.stack for sample in observer.sampler.samples]
    if len(positions) < FEWEST and observer.counter:
        positions = [work.stack for step in observer.counter.steps for work in step if work.stack]
    return surrounding(Counter(map(stack, positions)), stack(observer.end_stack))


def sampled_places(observer: Any) -> tuple[list[PlaceShare], NativeCode, Sampling]:
    """The places of the time outside of operators, the C code in it, and what sampling cost."""
    limits, native = observer.sampler.times(observer.counter.positions if observer.counter else ())
    around = _around(observer)
    python = sum(limits.get("python", {}).values())
    times = ((limit, place_in(stack, around), ns) for limit in limits for stack, ns in limits[limit].items())
    modules = sorted(native, key=lambda name: -native[name])
    return (
        [row for row in _shares(times) if row.limit != "ranks"],
        NativeCode(sum(native.values()) / python if python else 0.0, modules),
        Sampling(len(observer.sampler.samples), observer.sampler.cost),
    )


def trace_places(trace: Trace, nesting: Nesting, window: TracedSteps, calls: list[OperatorCall]) -> list[PlaceShare]:
    """Set the places of the calls of a trace, and return those of the time outside of operators, where it has Python
    stacks. On a device that is the time in which it is idle."""
    if not trace.python:
        return []
    stacks = TraceStacks(trace, nesting, window)
    name_places(nesting, calls, lambda _, event: stacks.at(event.thread, event.start))
    host = (event for event in nesting.events if event.kind in ("op", "call"))
    busy = [(event.start, event.end) for event in host if window.work or event.thread == nesting.thread]
    busy += [(work.start, work.end) for work in window.activity]
    covered = [*nesting.inputs, *busy, *((before, after) for (_, before), (after, _) in pairwise(window.steps))]
    times = [
        ("blocked" if WAITING.match(event.name) and not window.work else "python", stacks.place(stack), us)
        for event, stack, us in stacks.times(between(window.begin, window.end, covered))
    ]
    return _shares([*times, *(("input", stacks.place(stack), us) for _, stack, us in stacks.times(nesting.inputs))])
