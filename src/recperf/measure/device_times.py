"""Where the time of traced steps goes on a GPU: to the kernels of each operator, to copies nothing hides, and to the
reasons for which the device was idle.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .trace.idle import SLACK_US, gaps, queued, waits_for_device
from .trace.nesting import NONE, Cover, Nesting, merged
from .trace.read import Device
from .trace.window import TracedSteps

_COLLECTIVE = re.compile(r"nccl|c10d|rccl", re.IGNORECASE)
_BETWEEN = re.compile(r"HtoD|DtoH")


@dataclass(slots=True)
class DeviceTimes:
    """us of all traced steps."""

    waits: dict[str, float] = field(default_factory=dict)
    """By limit: transfer, communication, input, sync, launch, python, dispatch."""
    by_origin: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Device time and number of kernels by the host event that launched them; NONE: no event in the trace did."""
    graph: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Device time and number of kernels by name, for kernels of CUDA graphs, which no operator launched."""
    wall_us: float = 0.0
    busy_us: float = 0.0


def device_times(nesting: Nesting, window: TracedSteps) -> DeviceTimes:
    times = DeviceTimes(wall_us=window.end - window.begin)
    waits: defaultdict[str, float] = defaultdict(float)
    shares = _shared_time(window)
    launches: defaultdict[int, int] = defaultdict(int)
    for work in window.activity:
        if work.kind == "kernel":
            launches[nesting.launch(work)] += 1
    for work, us in shares:
        if us <= 0:
            continue
        times.busy_us += us
        if _COLLECTIVE.search(work.name):
            waits["communication"] += us
        elif work.kind == "copy" and _BETWEEN.search(work.name):
            waits["transfer"] += us
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
    _idle(waits, nesting, window)
    times.waits = dict(waits)
    return times


def _shared_time(window: TracedSteps) -> Iterable[tuple[Device, float]]:
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
            kernels = [i for i in running if not _hidden(window.activity[i])] or list(running)
            for i in kernels:
                time[i] += (at - before) / len(kernels)
        before = max(before, at)
        if begins:
            running.add(index)
        else:
            running.discard(index)
    return [(work, time[index]) for index, work in enumerate(window.activity)]


def _hidden(work: Device) -> bool:
    """Whether a kernel that runs at the same time hides this work."""
    return bool(_COLLECTIVE.search(work.name)) or (work.kind == "copy" and bool(_BETWEEN.search(work.name)))


def _idle(waits: defaultdict[str, float], nesting: Nesting, window: TracedSteps) -> None:
    """Divide the idle time of the device by what the host did meanwhile."""
    inputs = Cover(nesting.inputs)
    waiting = [nesting.events[index] for index in waits_for_device(nesting, window)]
    synced = merged((call.start, call.end + SLACK_US) for call in waiting)
    sync = Cover(synced)
    busy = Cover(merged((event.start, event.end) for event in nesting.events if event.kind in ("op", "call")))
    for start, end, following in gaps(window):
        length = end - start
        if following is not None and queued(following, window) <= start:
            # Queued in time: the device itself took that long between two kernels.
            waits["dispatch"] += length
            continue
        index = bisect_right(synced, (start, float("inf"))) - 1
        after_sync = index >= 0 and synced[index][0] < start <= synced[index][1]
        # What the host did before the work was queued; the rest is the way from the queue to the device.
        until = end if following is None else min(end, max(start, queued(following, window)))
        in_input = inputs.of(start, until)
        in_sync = sync.of(start, until)
        in_calls = busy.of(start, until) - in_sync
        outside = max(0.0, until - start - in_input - in_sync - max(0.0, in_calls))
        waits["input"] += in_input
        waits["python"] += outside
        waits["sync"] += in_sync
        waits["sync" if after_sync else "launch"] += max(0.0, length - in_input - in_sync - outside)
