"""Idle time of the device by cause, and transfers between host and device."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from typing import Any

from .nesting import NONE, Cover, Innermost, Nesting, merged
from .read import Device, Host, Trace
from .window import TracedSteps, per_step

CAUSES = ("input wait", "host wait", "kernel gap", "sync")
SLACK_US = 2.0
"""A waiting call may seem to end this long before the work it waited for: host and device clocks differ a little."""
_SYNC = re.compile(r"(?:cuda|cu|hip)(?:(?:Stream|Device|Ctx|Event)Synchronize|Memcpy(?!.*Async))")
_COPY = re.compile(r"(?:cuda|cu|hip)Memcpy.*Async")
_KINDS = {"HtoD": "host to device", "DtoH": "device to host", "DtoD": "device to device", "PtoP": "device to device"}
_FRAME = re.compile(r"\.py\(\d+\)")


def idle(trace: Trace, nesting: Nesting, window: TracedSteps) -> dict[str, Any]:
    """Idle time of the device. Every gap has one cause, so the causes sum to the idle time."""
    waits = waits_for_device(nesting, window)
    blocked = merged((call.start, call.end + SLACK_US) for call in (nesting.events[i] for i in waits))
    inputs = Cover(nesting.inputs)
    causes = dict.fromkeys(CAUSES, 0.0)
    for start, end, following in gaps(window):
        causes[_cause(start, end, following, window, inputs, blocked)] += end - start
    wall, idle_us = window.end - window.begin, sum(causes.values())
    scale = 1e3 * window.count
    return {
        "wall_ms": wall / scale,
        "busy_ms": (wall - idle_us) / scale,
        "idle_ms": idle_us / scale,
        "causes": {name: time / scale for name, time in causes.items()},
        "syncs": _callers(trace, nesting, window, waits),
    }


def gaps(window: TracedSteps) -> list[tuple[float, float, Device | None]]:
    """Gaps without device work, each with the work that follows it; None after the last."""
    gaps: list[tuple[float, float, Device | None]] = []
    done = window.begin
    for work in window.activity:
        if work.start > done:
            gaps.append((done, work.start, work))
        done = max(done, work.end)
    if window.end > done:
        gaps.append((done, window.end, None))
    return gaps


def _cause(
    start: float,
    end: float,
    following: Device | None,
    window: TracedSteps,
    inputs: Cover,
    blocked: list[tuple[float, float]],
) -> str:
    # Work that was already queued waited for neither the host nor the input.
    if following is not None and queued(following, window) <= start:
        return "kernel gap"
    if inputs.of(start, end) > 0.5 * (end - start):
        return "input wait"
    index = bisect_right(blocked, (start, float("inf"))) - 1
    return "sync" if index >= 0 and blocked[index][0] < start <= blocked[index][1] else "host wait"


def queued(work: Device, window: TracedSteps) -> float:
    """When the host had queued the work."""
    call = window.nesting.launch(work)
    if call == NONE:
        return float("inf")
    first = window.first_of_launch(work)
    # The launch call of a graph may still run while its first kernels do.
    return window.nesting.events[call].end if first is work else first.start


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


def _callers(trace: Trace, nesting: Nesting, window: TracedSteps, waits: list[int]) -> list[dict[str, Any]]:
    frames: dict[str, Innermost] = {}
    groups: defaultdict[tuple[str, str], list[Host]] = defaultdict(list)
    for index in waits:
        call = nesting.events[index]
        if call.thread not in frames:
            own = (frame for frame in trace.python if frame.thread == call.thread and _is_user_code(frame.name))
            frames[call.thread] = Innermost(own, nesting.rounding)
        operator = nesting.outermost(index, "op")
        part, frame = nesting.part[index], frames[call.thread].at(call.start)
        context = [nesting.events[operator].name] if operator != NONE else []
        context += [f"part {part}"] if part else []
        context += [frame.name] if frame else []
        groups[call.name, ", ".join(context) or "no operator, part or stack is known"].append(call)
    rows: list[dict[str, Any]] = [
        {
            "what": what,
            "caller": caller,
            "count": per_step(len(calls), window.count),
            "ms": sum(call.end - call.start for call in calls) / 1e3 / window.count,
        }
        for (what, caller), calls in groups.items()
    ]
    return sorted(rows, key=lambda row: row["ms"], reverse=True)


def _is_user_code(frame: str) -> bool:
    return _FRAME.search(frame) is not None and not frame.startswith("torch/") and "/torch/" not in frame


def transfers(window: TracedSteps) -> list[dict[str, Any]]:
    """Copies and fills by kind and by whether host memory was pinned."""
    kernels: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for work in window.work:
        if work.kind == "kernel":
            kernels[work.device].append((work.start, work.end))
    cover = {device: Cover(merged(stretches)) for device, stretches in kernels.items()}
    groups: defaultdict[tuple[str, bool | None], list[Device]] = defaultdict(list)
    for work in window.work:
        if work.kind != "kernel":
            groups[_kind(work), _pinned(work)].append(work)
    rows: list[dict[str, Any]] = []
    for (kind, pinned), members in groups.items():
        time = sum(work.end - work.start for work in members)
        size = sum(work.bytes for work in members)
        overlapped = sum(cover[work.device].of(work.start, work.end) for work in members if work.device in cover)
        rows.append(
            {
                "kind": kind,
                "count": per_step(len(members), window.count),
                "bytes": per_step(size, window.count),
                "ms": time / 1e3 / window.count,
                "gb_per_s": size / time / 1e3 if time else 0.0,
                "pinned": pinned,
                "overlapped_share": overlapped / time if time else 0.0,
            }
        )
    return sorted(rows, key=lambda row: row["ms"], reverse=True)


def _kind(work: Device) -> str:
    if work.kind == "set":
        return "memset"
    return next((kind for mark, kind in _KINDS.items() if mark in work.name), "device to device")


def _pinned(work: Device) -> bool | None:
    return True if "Pinned" in work.name else False if "Pageable" in work.name else None
