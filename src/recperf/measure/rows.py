"""Rows of figures about the operators of a step and their places, as attribution.py divides and profile.json keeps
them. Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from msgspec.structs import replace

from ..units import time as time_text
from .operators import COLLECTIVE, CallWork, kind_of_call, limit_of_kernel
from .records import Operator, PartTime, Place
from .timeline import COUNTED, GRAPH, NODE, OperatorCall, StepTimes
from .trace.nesting import NONE, Nesting, TracedSteps
from .trace.read import Host, summed

FUSED = ("CompiledFxGraph", "Torch-Compiled Region", "triton_")
"""Parts of the names under which the work of fused operators appears."""
OUTLIER = 4.0
"""A call that took this many times the median of its like was interrupted."""
NOTICEABLE = 0.02
"""Share of the operators' time from which those with unknown work are listed."""
EACH = 16
"""Of more traced steps, so many groups have their own times."""


def operator_rows(times: StepTimes, works: list[CallWork], window: TracedSteps) -> list[Operator]:
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
            each_ms=_each(window, [call for call, _ in members]),
        )
        for figure in COUNTED:
            setattr(row, figure, sum(getattr(work, figure) for work in counted) / times.steps)
        for fact in ("precision", "row_bytes", "table_rows"):
            setattr(row, fact, next((getattr(work, fact) for work in counted if getattr(work, fact)), None))
        for call, _ in members:
            call.row = row
        table.append(row)
    return sorted(table, key=lambda row: -row.ms)


def traced_ms(window: TracedSteps) -> list[float]:
    """The lengths of the traced steps, or of groups of them."""
    return list(_by_group(window, enumerate(window.step_ms())))


def _each(window: TracedSteps, calls: list[OperatorCall]) -> list[float]:
    """The time of calls in ms in each traced step, or group of steps; empty where their steps are not known."""
    if any(call.index == NONE for call in calls):
        return []
    events = window.nesting.events
    return _by_group(window, ((window.step(events[call.index].start), call.us / 1e3) for call in calls))


def _by_group(window: TracedSteps, times: Iterable[tuple[int, float]]) -> list[float]:
    groups = [0.0] * min(EACH, window.count)
    for step, ms in times:
        groups[max(0, step) * len(groups) // window.count] += ms
    return groups


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
