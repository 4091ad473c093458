"""Collectives of a trace: kernels of NCCL on a device, or the ranges that torch records around those of a host."""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod
from typing import NamedTuple

from ...units import size, time
from .nesting import COLLECTIVE, Cover, Nesting, merged
from .read import ELEMENT_BYTES, Host, Trace
from .records import TracedCollective, TracedCommunication
from .window import TracedSteps, per_step

_KERNEL = re.compile(r"(?:nccl|rccl)\w*?Kernel_(?P<name>[A-Za-z]+)", re.IGNORECASE)


class Collective(NamedTuple):
    name: str
    start: float
    end: float
    bytes: int


def collectives(nesting: Nesting, window: TracedSteps) -> list[Collective]:
    """The collectives of the steps in order of time, those of the device if it has any."""
    found = [
        Collective(match["name"], work.start, work.end, work.bytes)
        for work in window.work
        if work.kind == "kernel" and (match := _KERNEL.search(work.name))
    ]
    if not found:
        found = [
            Collective(event.name.partition(":")[2], event.start, event.end, _bytes(event))
            for event in nesting.events
            if event.kind == "range" and COLLECTIVE.match(event.name) and window.holds(event.start)
        ]
    return sorted(found, key=lambda item: item.start)


def lateness(items: list[Collective]) -> list[str]:
    """How much of the collective that takes most time waits for late ranks, as far as its calls of the same size tell.

    A rank that is late in every call cannot be told from slow bytes here.
    """
    groups: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for item in items:
        groups[item.name, item.bytes].append((item.end - item.start) / 1e3)
    if not groups:
        return []
    (name, moved), calls = max(groups.items(), key=lambda group: sum(group[1]))
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
    groups: defaultdict[str, list[Collective]] = defaultdict(list)
    for item in items:
        groups[item.name].append(item)
    scale = 1e3 * window.count
    rows: list[TracedCollective] = []
    for name, members in groups.items():
        union = merged((item.start, item.end) for item in members)
        rows.append(
            TracedCollective(
                name=name,
                count=per_step(len(members), window.count),
                bytes=per_step(sum(item.bytes for item in members), window.count),
                ms=sum(item.end - item.start for item in members) / scale,
                exposed_ms=sum(end - start - busy.of(start, end) for start, end in union) / scale,
            )
        )
    rows.sort(key=lambda row: (-(row.exposed_ms or 0.0), -(row.ms or 0.0), row.name))
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
