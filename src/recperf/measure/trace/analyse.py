"""Analyses a trace per step: kernels, parts, idle time of the device by cause, transfers.

All figures are sums over whole steps divided by the number of steps. A host event belongs to the step in which it
begins, device work to the step that launched it, however late it ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict

from ...errors import DataError
from ..operators import CallWork
from ..profile_records import Idle, Kernel, Kernels, Missing, SmallKernels
from .collectives import communication
from .idle import idle, transfers
from .nesting import NONE, Nesting, merged
from .read import MERGED, Device, Trace, facts_in, read
from .records import RankFacts, StepTables, TraceFacts
from .regions import modules, parts, timings
from .window import SMALL_US, TracedSteps, per_step
from .work import work_of

NO_DEVICE = "no device in this trace"
NO_WORK = "the steps launched no device work"


def analyse(trace: Trace) -> StepTables:
    """The tables of the steps of a trace.

    Steps are the ranges `recperf.step#N`, or torch's own `ProfilerStep#N`, or end with the optimizer's step; a trace
    with none of these counts as one step.
    """
    return analyse_steps(trace, *steps_of(trace))


def analyse_steps(trace: Trace, nesting: Nesting, window: TracedSteps, facts: TraceFacts | None = None) -> StepTables:
    missing = None if window.work else NO_WORK if trace.device else NO_DEVICE
    return StepTables(
        **asdict(facts or TraceFacts()),
        window=window.summary(),
        parts=parts(nesting, window),
        modules=modules(trace, nesting, window),
        communication=communication(trace, nesting, window),
        kernels=Kernels(missing=missing) if missing else _kernels(nesting, window),
        idle=Idle(missing=missing) if missing else idle(trace, nesting, window),
        transfers=Missing(missing) if missing else transfers(window),
    )


def steps_of(trace: Trace) -> tuple[Nesting, TracedSteps]:
    """The steps of a trace, and the nesting of its host events."""
    if not trace.host and not trace.device:
        raise DataError(
            "the trace has no events of torch.profiler with valid times",
            where={"file": trace.path, "events": f"{trace.events:,}, {trace.ignored:,} of unknown kind or time"},
            fix="record it with torch.profiler.profile(...) and export_chrome_trace",
        )
    nesting = Nesting(trace)
    return nesting, TracedSteps(trace, nesting)


class TimedTrace(NamedTuple):
    """The times of every single step of a trace file, with facts about the file."""

    facts: TraceFacts
    steps_from: str
    device: str
    steps: list[float]
    times: dict[str, dict[str, list[float]]]
    """By kind and name, in ms."""


def timed_file(path: Path) -> TimedTrace:
    trace = read_one(path)
    nesting, window = steps_of(trace)
    facts = facts_of(trace)
    times = timings(nesting, window, self_times(nesting, window))
    return TimedTrace(facts, window.steps_from, device_name(facts, window), window.step_ms(), times)


def device_name(facts: TraceFacts, window: TracedSteps) -> str:
    """The name of the busiest device; `cpu` where the steps launched no device work.

    The trace of an AMD machine counts its processors too: number 2 may be the first GPU of the list.
    """
    if window.device is None:
        return "cpu"
    names = facts.devices
    if len(set(names)) == 1:
        return names[0]
    return names[window.device] if window.device < len(names) else f"device {window.device}"


def read_one(path: Path) -> Trace:
    """The trace of one rank."""
    trace = read(path)
    if MERGED in facts_in(trace.header):
        raise DataError(
            "a merged trace contains the steps of several ranks", where={"file": path}, fix="use the trace of one rank"
        )
    return trace


def facts_of(trace: Trace) -> TraceFacts:
    """What the header of a trace says about its origin."""
    host = facts_in(trace.header).get("host") or trace.header.get("host_name")
    return TraceFacts(
        host=str(host) if host else None,
        file=str(trace.path),
        bytes=trace.path.stat().st_size,
        events=trace.events,
        part=trace.part or None,
        ignored=trace.ignored,
        torch=_plain(trace.header.get("torch_version")),
        cuda=_version(trace.header.get("cuda_runtime_version")),
        devices=_devices(trace.header.get("deviceProperties")),
        ranks=_ranks(facts_in(trace.header, "distributedInfo")),
    )


def _version(number: Any) -> str | None:
    """`12.8` for 12080."""
    return f"{number // 1000}.{number % 1000 // 10}" if isinstance(number, int) else None


def _devices(properties: Any) -> list[str]:
    devices = properties if isinstance(properties, list) else []
    return [str(item["name"]) for item in devices if isinstance(item, dict) and "name" in item]


def _ranks(distributed: dict[str, Any]) -> RankFacts | None:
    if "rank" not in distributed:
        return None
    return RankFacts(*(_plain(distributed.get(name)) for name in ("rank", "world_size", "backend")))


def _plain(value: Any) -> str | int | None:
    """A text or an integer of the header; anything else is damage."""
    return value if isinstance(value, str | int) else None


def self_times(nesting: Nesting, window: TracedSteps) -> dict[int, float]:
    """The time of every operator inside the steps without the operators inside it, by index."""
    events = nesting.events
    own = {
        i: event.end - event.start for i, event in enumerate(events) if event.kind == "op" and window.holds(event.start)
    }
    for i in own:
        above = nesting.above(nesting.parent[i], "op")
        if above in own:
            own[above] -= events[i].end - events[i].start
    return own


WRAPS = 0.5
"""An operator only passes on work if operators inside it move more than this share of its bytes."""


def counted(nesting: Nesting, inside: Iterable[int]) -> dict[int, CallWork | None]:
    """The work of every operator, with no work counted twice; None where it is not known or counts for an operator
    inside it.

    An operator often calls another that does the work: a linear layer calls addmm, which copies its bias. Work counts
    for the innermost product, otherwise for the innermost lookup of rows and for the innermost operator whose bytes are
    known.
    """
    works = {i: work_of(nesting.events[i].name, nesting.events[i].shapes) for i in inside}
    own = {i: work for i, work in works.items() if work is not None}
    products = {i for i, work in own.items() if work.flops}
    products -= _above_any(nesting, products)
    within: set[int] = set()
    for i in works:
        above = nesting.above(nesting.parent[i], "op")
        if above in products or above in within:
            within.add(i)
    lookups = {i for i, work in own.items() if work.rows} - within
    lookups -= _above_any(nesting, lookups)
    streams = set(own) - within - lookups - _above_any(nesting, products | lookups)
    inner: defaultdict[int, int] = defaultdict(int)
    for i in reversed(works):
        # Operators come after those around them. One that copies a scalar still does its own work.
        size = own[i].bytes if i in streams else 0
        if i in streams and inner[i] > WRAPS * size:
            streams.discard(i)
        inner[nesting.above(nesting.parent[i], "op")] += max(inner[i], size)
    working = products | lookups | streams
    return {i: own[i] if i in working else None for i in works}


def _above_any(nesting: Nesting, indices: Iterable[int]) -> set[int]:
    ancestors: set[int] = set()
    for i in indices:
        above = nesting.parent[i]
        while above != NONE and above not in ancestors:
            ancestors.add(above)
            above = nesting.parent[above]
    return ancestors


def _kernels(nesting: Nesting, window: TracedSteps) -> Kernels:
    kernels = [work for work in window.work if work.kind == "kernel"]
    groups: defaultdict[tuple[str, str | None], list[Device]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.name, nesting.part_of(nesting.origin(kernel))].append(kernel)
    total = sum(kernel.end - kernel.start for kernel in kernels)
    rows: list[Kernel] = []
    for (name, part), members in groups.items():
        time = sum(kernel.end - kernel.start for kernel in members)
        delays = [delay for kernel in members if (delay := window.delay(kernel)) is not None]
        rows.append(
            Kernel(
                name=name,
                part=part,
                count=per_step(len(members), window.count),
                total_ms=time / 1e3 / window.count,
                mean_us=time / len(members),
                share=time / total if total else 0.0,
                launch_delay_us=sum(delays) / len(delays) if delays else None,
            )
        )
    rows.sort(key=lambda row: (-row.total_ms, row.name))
    small = [kernel for kernel in kernels if kernel.end - kernel.start < SMALL_US]
    busy = sum(end - start for start, end in merged((kernel.start, kernel.end) for kernel in kernels))
    return Kernels(
        rows=rows,
        count=per_step(len(kernels), window.count),
        busy_ms=busy / 1e3 / window.count,
        small=SmallKernels(
            count=per_step(len(small), window.count),
            share_of_count=len(small) / len(kernels) if kernels else 0.0,
            total_ms=sum(kernel.end - kernel.start for kernel in small) / 1e3 / window.count,
        ),
        steps=window.count,
    )
