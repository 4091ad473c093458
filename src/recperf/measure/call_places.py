"""Gives operators their place in the user's program, and lists the places that take most of a step. Torch-free."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from .places import BACKWARD, FEWEST, Place, Stack, place_in, surrounding
from .timeline import NODE, WAITING, Call
from .trace.idle import gaps
from .trace.nesting import NONE, Nesting, between, common, merged
from .trace.read import Host, Trace
from .trace.stacks import TraceStacks
from .trace.window import TracedSteps

SMALLEST = 0.005
"""Share of a step from which a place is listed."""


def name_places(nesting: Nesting, calls: list[Call], own: Callable[[Call, Host], tuple[Place | None, bool]]) -> None:
    """Set the places of calls. `own` returns the place from which a call was made, and whether only autograd's backward
    pass is inside it: then its operators belong to the lines whose forward pass recorded them."""
    events = nesting.events
    listed = [(call, events[call.index], *own(call, events[call.index])) for call in calls if call.index != NONE]
    nodes = [_node(nesting, call.index) for call, *_ in listed]
    forward = {
        event.sequence: place for (_, event, place, _), node in zip(listed, nodes)
        if node == NONE and place is not None and event.sequence is not None
    }  # fmt: skip
    inner: dict[int, Place] = {}
    for (call, _, place, backward), node in reversed(list(zip(listed, nodes))):
        sequence = events[node].sequence if node != NONE else None
        if sequence in forward and (backward or (place is None and call.index not in inner)):
            place = forward[sequence]._replace(backward=True)
        call.place = place or inner.get(call.index)
        above = nesting.above(nesting.parent[call.index], "op")
        if call.place is not None and above != NONE:
            inner[above] = call.place


def _node(nesting: Nesting, index: int) -> int:
    while index != NONE and not nesting.events[index].name.startswith(NODE):
        index = nesting.parent[index]
    return index


def place_rows(operators: list[dict[str, Any]], shares: dict[str, float], seen: dict[str, Any]) -> list[dict[str, Any]]:
    """The places of a step by limit, largest first; `share` is that of the step. Operators have their own places, other
    time those of `seen`, as shares of their limit."""
    whole = sum(seen["waits"].values()) + sum(row["ms"] for row in seen["operators"])
    times: defaultdict[tuple[Place, str], float] = defaultdict(float)
    for row in operators:
        for limit, ms in row["limits"].items() if row.get("place") and whole else ():
            times[Place(**row["place"]), limit] += ms / whole
    for row in seen.get("places") or ():
        times[Place(**row["place"]), row["limit"]] += row["share"] * shares.get(row["limit"], 0.0)
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return [
        {"limit": limit, "share": share, "ms": share * whole, **place._asdict()}
        for (place, limit), share in ordered
        if share >= SMALLEST
    ]


def shares_by_place(limit: str, places: dict[Place | None, float]) -> list[dict[str, Any]]:
    """Places of one limit with their shares of it."""
    whole = sum(places.values())
    ordered = sorted(((place, ns) for place, ns in places.items() if place), key=lambda item: -item[1])
    return [{"limit": limit, "share": ns / whole, "place": place._asdict()} for place, ns in ordered if ns > 0]


def observer_places(observer: Any) -> Callable[[Call, Host], tuple[Place | None, bool]]:
    """A function that returns the place of a call of an Observer's counted step, and whether it is in a backward
    pass."""
    around = _around(observer)

    def own(call: Call, event: Host) -> tuple[Place | None, bool]:
        stack = call.work.stack if call.work else ()
        backward = bool(call.work) and stack[:1] in ((), (BACKWARD,))
        return place_in(observer.stacks.stack(stack), around), backward

    return own


def _around(observer: Any) -> Stack:
    """The frames around all of the steps that an Observer saw."""
    stack = observer.stacks.stack
    positions = [sample.stack for sample in observer.sampler.kept]
    if len(positions) < FEWEST and observer.counter:
        positions = [work.stack for step in observer.counter.steps for work in step if work.stack]
    return surrounding(Counter(map(stack, positions)), stack(observer.end_stack))


def sampled_places(observer: Any) -> dict[str, Any]:
    """`places` of the time outside of operators, the C code in it (`native`), and what sampling cost."""
    limits, native = observer.sampler.times(observer.counter.positions if observer.counter else ())
    around = _around(observer)
    rows = []
    for limit in ("python", "input", "blocked"):
        places: defaultdict[Place | None, float] = defaultdict(float)
        for stack, ns in limits[limit].items():
            places[place_in(stack, around)] += ns
        rows += shares_by_place(limit, places)
    python = sum(limits["python"].values())
    return {
        "places": rows,
        "native": {
            "share": sum(native.values()) / python if python else 0.0,
            "modules": sorted(native, key=lambda name: -native[name]),
        },
        "sampling": {"samples": len(observer.sampler.kept), "share": observer.sampler.cost},
    }


def trace_places(trace: Trace, nesting: Nesting, window: TracedSteps, calls: list[Call]) -> list[dict[str, Any]]:
    """Set the places of the calls of a trace, and return those of the time outside of operators, where it has Python
    stacks. On a device that is the time in which it is idle."""
    if not trace.python:
        return []
    stacks = TraceStacks(trace, nesting, window)
    name_places(nesting, calls, lambda _, event: stacks.at(event.thread, event.start))
    busy = [
        (event.start, event.end) for event in nesting.events
        if event.kind in ("op", "call") and (window.work or event.thread == nesting.thread)
    ]  # fmt: skip
    idle = [(start, end) for start, end, _ in gaps(window)] if window.work else window.steps
    inputs = common(nesting.inputs, idle)
    outside = common(idle, between(merged([*nesting.inputs, *busy])))
    limits: defaultdict[str, defaultdict[Place | None, float]] = defaultdict(lambda: defaultdict(float))
    for event, stack, us in stacks.times(outside):
        limits["blocked" if WAITING.match(event.name) and not window.work else "python"][stacks.place(stack)] += us
    for _, stack, us in stacks.times(inputs):
        limits["input"][stacks.place(stack)] += us
    return [row for limit, places in limits.items() for row in shares_by_place(limit, places)]
