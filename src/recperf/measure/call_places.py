"""Gives operators their place in the user's program, and lists the places that take most of a step. Torch-free."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from msgspec.structs import asdict, replace

from .attribution import divided_ms
from .places import BACKWARD, Stack, place_in, surrounding
from .records import DividedOperator, NativeCode, Observed, Place, PlaceShare, PlaceTime, Sampling
from .timeline import NODE, WAITING, Call
from .trace.nesting import NONE, Nesting, between
from .trace.read import Host, Trace
from .trace.stacks import TraceStacks
from .trace.window import TracedSteps

SMALLEST = 0.005
"""Share of a step from which a place is listed."""
FEWEST = 10
"""Samples that tell which frames surround the step; with fewer, its operators tell."""


def name_places(nesting: Nesting, calls: list[Call], own: Callable[[Call, Host], tuple[Place | None, bool]]) -> None:
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
        PlaceShare(limit, time / sum(places.values()), place)
        for limit, places in limits.items()
        for place, time in sorted(places.items(), key=lambda item: -item[1])
        if place and time > 0
    ]


def observer_places(observer: Any) -> Callable[[Call, Host], tuple[Place | None, bool]]:
    """A function that returns the place of a call of an Observer's counted step, and whether it is in a backward
    pass."""
    around = _around(observer)

    def own(call: Call, event: Host) -> tuple[Place | None, bool]:
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


def trace_places(trace: Trace, nesting: Nesting, window: TracedSteps, calls: list[Call]) -> list[PlaceShare]:
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
