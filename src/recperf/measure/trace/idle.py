"""What steps of a trace wait for: idle time of the device by cause, transfers, collectives."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ...units import size, time
from ..profile_records import Collective, Idle, Sync, Transfer
from .nesting import COLLECTIVE, NONE, Cover, Innermost, Nesting, TracedSteps, merged, per_step
from .read import ELEMENT_BYTES, Host, Trace, TracedDevice, grouped
from .records import TracedCommunication
from .regions import frame_of

SLACK_US = 2.0
"""A waiting call may seem to end this long before the work it waited for: host and device clocks differ a little."""
LONGEST_US = 20.0
"""From a kernel to the next one that is queued a device needs some microseconds, never more than this."""
_SYNC = re.compile(r"(?:cuda|cu|hip)(?:(?:Stream|Device|Ctx|Event)Synchronize|Memcpy(?!.*Async))")
_COPY = re.compile(r"(?:cuda|cu|hip)Memcpy.*Async")
_KINDS = {"HtoD": "host to device", "DtoH": "device to host", "DtoD": "device to device", "PtoP": "device to device"}
_NCCL = re.compile(r"nccl|c10d|rccl", re.IGNORECASE)
_BETWEEN = re.compile(r"HtoD|DtoH")
_KERNEL = re.compile(r"(?:nccl|rccl)\w*?Kernel_(?P<name>[A-Za-z]+)", re.IGNORECASE)


def idle(trace: Trace, nesting: Nesting, window: TracedSteps) -> Idle:
    """Idle time of the device, divided among limits."""
    waits = waits_for_device(nesting, window)
    causes = idle_by_limit(nesting, window, waits)
    wall, idle_us = window.end - window.begin, sum(causes.values())
    scale = 1e3 * window.count
    return Idle(
        wall_ms=wall / scale,
        busy_ms=(wall - idle_us) / scale,
        idle_ms=idle_us / scale,
        causes={name: time / scale for name, time in causes.items()},
        syncs=_callers(trace, nesting, window, waits),
    )


class _Gap(NamedTuple):
    """A stretch without device work."""

    start: float
    end: float
    until: float
    """When the host had queued the work that follows; the rest is the way from the queue to the device."""
    queued: bool
    """Whether that was before the gap began."""
    after_sync: bool
    """Whether the host waited for the device when the gap began."""


def _gaps(window: TracedSteps, waiting: list[tuple[float, float]]) -> Iterator[_Gap]:
    done = window.begin
    for work in (*window.activity, None):
        start, end = done, work.start if work else window.end
        if end > start:
            queue = _queued(work, window) if work else math.inf
            index = bisect_right(waiting, (start, math.inf)) - 1
            after_sync = index >= 0 and waiting[index][0] < start <= waiting[index][1]
            yield _Gap(start, end, min(end, max(start, queue)), queue <= start, after_sync)
        done = max(done, work.end) if work else done


def _queued(work: TracedDevice, window: TracedSteps) -> float:
    """When the host had queued the work."""
    call = window.nesting.launch(work)
    if call == NONE:
        return math.inf
    first = window.first_of_launch(work)
    # The launch call of a graph may still run while its first kernels do.
    return window.nesting.events[call].end if first is work else first.start


def _waiting(nesting: Nesting, waits: list[int]) -> list[tuple[float, float]]:
    """When the host waits for the device."""
    return merged((nesting.events[index].start, nesting.events[index].end + SLACK_US) for index in waits)


def waits_for_device(nesting: Nesting, window: TracedSteps) -> list[int]:
    """Calls inside steps in which the host waits for the device."""
    copies = {work.correlation: work for work in window.work if work.kind == "copy"}
    waits = []
    for index, event in enumerate(nesting.events):
        if event.kind == "call" and window.holds(event.start):
            copy = copies.get(event.correlation) if _COPY.match(event.name) else None
            # The driver waits for a copy of memory that is not pinned, although the call is named Async.
            waited = copy is not None and "Pageable" in copy.name and event.end >= copy.end
            if waited or _SYNC.match(event.name):
                waits.append(index)
    return waits


def _callers(trace: Trace, nesting: Nesting, window: TracedSteps, waits: list[int]) -> list[Sync]:
    frames: dict[str, Innermost] = {}
    groups: defaultdict[tuple[str, str], list[Host]] = defaultdict(list)
    for index in waits:
        call = nesting.events[index]
        if call.thread not in frames:
            own = (frame for frame in trace.python if frame.thread == call.thread and frame_of(frame.name))
            frames[call.thread] = Innermost(own, nesting.rounding)
        operator = nesting.outermost(index, "op")
        part, frame = nesting.part[index], frames[call.thread].at(call.start)
        context = [nesting.events[operator].name] if operator != NONE else []
        context += [f"part {part}"] if part else []
        context += [frame.name] if frame else []
        groups[call.name, ", ".join(context) or "no operator, part or stack is known"].append(call)
    rows = [
        Sync(
            what=what,
            caller=caller,
            count=per_step(len(calls), window.count),
            ms=sum(call.end - call.start for call in calls) / 1e3 / window.count,
        )
        for (what, caller), calls in groups.items()
    ]
    return sorted(rows, key=lambda row: row.ms, reverse=True)


def transfers(window: TracedSteps) -> list[Transfer]:
    """Copies and fills by kind and by whether host memory was pinned."""
    kernels = grouped((work for work in window.work if work.kind == "kernel"), lambda work: work.device)
    cover = {device: Cover(merged((work.start, work.end) for work in own)) for device, own in kernels.items()}
    groups = grouped((work for work in window.work if work.kind != "kernel"), _kind)
    rows: list[Transfer] = []
    for (kind, pinned), members in groups.items():
        time = sum(work.end - work.start for work in members)
        size = sum(work.bytes for work in members)
        overlapped = sum(cover[work.device].of(work.start, work.end) for work in members if work.device in cover)
        rows.append(
            Transfer(
                kind=kind,
                count=per_step(len(members), window.count),
                bytes=per_step(size, window.count),
                ms=time / 1e3 / window.count,
                gb_per_s=size / time / 1e3 if time else 0.0,
                pinned=pinned,
                overlapped_share=overlapped / time if time else 0.0,
            )
        )
    return sorted(rows, key=lambda row: row.ms, reverse=True)


def _kind(work: TracedDevice) -> tuple[str, bool | None]:
    """The kind of a copy or a fill, and whether host memory was pinned."""
    kind = next((kind for mark, kind in _KINDS.items() if mark in work.name), "device to device")
    pinned = True if "Pinned" in work.name else False if "Pageable" in work.name else None
    return "memset" if work.kind == "set" else kind, pinned


@dataclass(slots=True)
class DeviceTimes:
    """us of all traced steps."""

    waits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By limit: transfer, communication, input, sync, launch, python, dispatch, blocked."""
    by_origin: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Device time and number of kernels by the host event that launched them; NONE: no event in the trace did."""
    graph: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Device time and number of kernels by name, for kernels of CUDA graphs, which no operator launched."""
    busy_us: float = 0.0


def device_times(nesting: Nesting, window: TracedSteps) -> DeviceTimes:
    times = DeviceTimes()
    launches: defaultdict[int, int] = defaultdict(int)
    for work in window.activity:
        if work.kind == "kernel":
            launches[nesting.launch(work)] += 1
    for work, us in _shared_time(window):
        if us <= 0:
            continue
        times.busy_us += us
        if limit := limit_of_work(work):
            times.waits[limit] += us
        else:
            call = nesting.launch(work)
            # A launch of many kernels is that of a graph: its operators are not known.
            if call != NONE and launches[call] > 1 and "Graph" in nesting.events[call].name:
                before = times.graph.get(work.name, (0.0, 0))
                times.graph[work.name] = before[0] + us, before[1] + 1
            else:
                origin = nesting.above(nesting.origin(work), "op")
                before = times.by_origin.get(origin, (0.0, 0))
                times.by_origin[origin] = before[0] + us, before[1] + 1
    for limit, us in idle_by_limit(nesting, window, waits_for_device(nesting, window)).items():
        times.waits[limit] += us
    return times


def _shared_time(window: TracedSteps) -> list[tuple[TracedDevice, float]]:
    """The time of each piece of device work; what runs at the same time shares it, and kernels hide copies."""
    edges = sorted(
        [(max(work.start, window.begin), 1, index) for index, work in enumerate(window.activity)]
        + [(min(work.end, window.end), 0, index) for index, work in enumerate(window.activity)]
    )
    time = [0.0] * len(window.activity)
    running: set[int] = set()
    before = window.begin
    for at, begins, index in edges:
        if running and at > before:
            kernels = [i for i in running if not limit_of_work(window.activity[i])] or list(running)
            for i in kernels:
                time[i] += (at - before) / len(kernels)
        before = max(before, at)
        if begins:
            running.add(index)
        else:
            running.discard(index)
    return [(work, time[index]) for index, work in enumerate(window.activity)]


def limit_of_work(work: TracedDevice) -> str:
    """The limit of device work that belongs to no operator and that a kernel at the same time hides; else empty."""
    if _NCCL.search(work.name):
        return "communication"
    return "transfer" if work.kind == "copy" and _BETWEEN.search(work.name) else ""


def idle_by_limit(nesting: Nesting, window: TracedSteps, waits: list[int]) -> dict[str, float]:
    """The idle time of the device in us, divided among limits by what the host did meanwhile; the parts sum to it.

    `waits` are the calls in which the host waits for the device.
    """
    idle = dict.fromkeys(("input", "sync", "launch", "python", "dispatch", "blocked"), 0.0)
    inputs, waiting = Cover(nesting.inputs), _waiting(nesting, waits)
    sync = Cover(waiting)
    busy = Cover(merged((event.start, event.end) for event in nesting.events if event.kind in ("op", "call")))
    for gap in _gaps(window, waiting):
        start, until, length = gap.start, gap.until, gap.end - gap.start
        if gap.queued:
            # Queued in time: the device itself took that long between two kernels, or waited for what is not known.
            idle["dispatch"] += min(length, LONGEST_US)
            idle["blocked"] += max(0.0, length - LONGEST_US)
            continue
        in_input = inputs.of(start, until)
        in_sync = min(sync.of(start, until), until - start - in_input)
        in_calls = max(0.0, busy.of(start, until) - in_sync)
        outside = max(0.0, until - start - in_input - in_sync - in_calls)
        idle["input"] += in_input
        idle["python"] += outside
        idle["sync"] += in_sync
        idle["sync" if gap.after_sync else "launch"] += max(0.0, length - in_input - in_sync - outside)
    return idle


class CollectiveCall(NamedTuple):
    name: str
    start: float
    end: float
    bytes: int


def collectives(nesting: Nesting, window: TracedSteps) -> list[CollectiveCall]:
    """The collectives of the steps in order of time, those of the device if it has any."""
    listed = [
        CollectiveCall(match["name"], work.start, work.end, work.bytes)
        for work in window.work
        if work.kind == "kernel" and (match := _KERNEL.search(work.name))
    ]
    if not listed:
        listed = [
            CollectiveCall(event.name.partition(":")[2], event.start, event.end, _bytes(event))
            for event in nesting.events
            if event.kind == "range" and COLLECTIVE.match(event.name) and window.holds(event.start)
        ]
    return sorted(listed, key=lambda item: item.start)


def lateness(items: list[CollectiveCall]) -> list[str]:
    """How much of the collective that takes most time waits for late ranks, as far as its calls of the same size tell.

    A rank that is late in every call looks like slow bytes here.
    """
    groups = grouped(items, lambda item: (item.name, item.bytes))
    if not groups:
        return []
    times = {key: [(item.end - item.start) / 1e3 for item in group] for key, group in groups.items()}
    (name, moved), calls = max(times.items(), key=lambda group: sum(group[1]))
    mean, fastest = sum(calls) / len(calls), min(calls)
    late = f"{1 - fastest / mean if mean else 0.0:.0%}"
    return [
        f"collective {name} of {size(moved)} takes {time(mean)}, the fastest of {len(calls)} calls {time(fastest)}, "
        f"so at least {late} of it waits for late ranks; whether the rest waits for a rank that is always late or for "
        "bytes is not known"
    ]


def communication(trace: Trace, nesting: Nesting, window: TracedSteps) -> TracedCommunication:
    """Collectives by name: how long they take, and for how long nothing else runs."""
    items = collectives(nesting, window)
    if not items:
        return TracedCommunication(missing="no collective in this trace")
    on_device = any(_KERNEL.search(work.name) for work in window.work)
    busy = Cover(other_work(nesting, window, on_device=on_device))
    groups = grouped(items, lambda item: item.name)
    scale = 1e3 * window.count
    rows: list[Collective] = []
    for name, members in groups.items():
        union = merged((item.start, item.end) for item in members)
        rows.append(
            Collective(
                what=name,
                count=per_step(len(members), window.count),
                bytes=per_step(sum(item.bytes for item in members), window.count),
                ms=sum(item.end - item.start for item in members) / scale,
                exposed_ms=sum(end - start - busy.of(start, end) for start, end in union) / scale,
            )
        )
    rows.sort(key=lambda row: (-(row.exposed_ms or 0.0), -(row.ms or 0.0), row.what))
    union = merged((item.start, item.end) for item in items)
    return TracedCommunication(
        where="device" if on_device else "host",
        rows=rows,
        exposed_ms=sum(end - start - busy.of(start, end) for start, end in union) / scale,
    )


def other_work(nesting: Nesting, window: TracedSteps, *, on_device: bool) -> list[tuple[float, float]]:
    """When work other than collectives runs: on the devices, or in the operators of the step's thread."""
    if on_device:
        return merged((work.start, work.end) for work in window.work if not _KERNEL.search(work.name))
    own = (event for event in nesting.events if event.kind == "op" and event.thread == nesting.thread)
    return merged((event.start, event.end) for event in own)


def _bytes(event: Host) -> int:
    if event.shapes is None:
        return 0
    sizes = zip(event.shapes.dims, event.shapes.types)
    return sum(prod(dim) * ELEMENT_BYTES.get(kind, 0) for dim, kind in sizes)
