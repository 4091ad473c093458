"""One traced step in lanes, as a page draws it: waits for input, operators of the host's threads, work of the device.

Times are those of the trace, which slows the host. An operator is drawn over the one that called it, so that what
remains visible of that is its own time. Also makes the figures of a step as small as profile.json stores them.
Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from .records import Observed, Operator, TracedCall, TracedStep
from .timeline import COUNTED, Call, StepTimes
from .trace.collectives import collectives
from .trace.idle import BETWEEN, NCCL, waits_for_device
from .trace.nesting import NONE, Nesting, merged
from .trace.read import Device
from .trace.window import TracedSteps

INPUT, HOST, OTHERS, DEVICE = "input", "host", "other threads", "device"
MOST = 400
"""Calls that are stored one by one, the longest."""
MOST_ROWS = 60
"""Operators of a stored profile; the rest are joined."""
SLICES = 200
"""Parts of a step; shorter calls that begin in the same one are joined."""


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

    def row(call: Call | None) -> int | None:
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
        limit = _limit(work)
        operator = None if limit else row(times.by_kernel.get(work.name) or times.by_origin.get(origin))
        yield TracedCall(DEVICE, work.start, work.end - work.start, operator, work.name, limit)


def _limit(work: Device) -> str:
    """The limit of device work that belongs to no operator."""
    if NCCL.search(work.name):
        return "communication"
    return "transfer" if work.kind == "copy" and BETWEEN.search(work.name) else ""


def _bounded(calls: list[TracedCall], whole: float) -> list[TracedCall]:
    """The longest calls, and the others merged; each lane in the order in which it is drawn."""
    ordered = sorted(calls, key=lambda call: -call.us)
    groups: defaultdict[tuple[str, int], list[TracedCall]] = defaultdict(list)
    for call in ordered[MOST:]:
        groups[call.lane, int(SLICES * call.start_us / whole)].append(call)
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


def compact(figures: Observed) -> Observed:
    """The figures with at most `MOST_ROWS` operators; the smaller ones are joined by their kind."""
    rest: defaultdict[tuple[Any, ...], list[Operator]] = defaultdict(list)
    for row in figures.operators[MOST_ROWS:]:
        kind = row.kind, bool(row.kernels), row.by_name, row.communication
        rest[*kind, row.precision, row.row_bytes].append(row)
    joined = [_joined(group) if len(group) > 1 else group[0] for group in rest.values()]
    rows = [*figures.operators[:MOST_ROWS], *joined]
    place = {id(row): MOST_ROWS + number for number, group in enumerate(rest.values()) for row in group}
    return replace(figures, operators=rows, timeline=_renumbered(figures, place))


def _renumbered(figures: Observed, place: dict[int, int]) -> TracedStep | None:
    """The timeline with the numbers of joined rows; its calls have their own names."""
    if figures.timeline is None:
        return None
    calls = []
    for call in figures.timeline.calls:
        row = None if call.operator is None else figures.operators[call.operator]
        joined = row is not None and id(row) in place
        calls.append(replace(call, operator=place[id(row)], name=call.name or row.name) if row and joined else call)
    return replace(figures.timeline, calls=calls)


def _joined(group: list[Operator]) -> Operator:
    summed = ("calls", "python_calls", "ms", "kernels", *COUNTED)
    return replace(
        group[0],
        name=f"{len(group)} smaller operators ({group[0].kind})",
        part=None,
        place=None,
        counted=all(row.counted for row in group),
        **{name: sum(getattr(row, name) for row in group) for name in summed},
    )
