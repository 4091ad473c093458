"""Turns what an observer saw into plain figures about a step: waits, operators with their time and counted work."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from ..machine import usable_cores
from .clocks import MODULE, Counts
from .intervals import of_steps
from .observing import Observer
from .operators import CallWork
from .place_shares import FEWEST, add_samples, around_steps, observer_places
from .records import Observed, ObservedSteps, TimingCost
from .rows import clip, name_places, operator_rows, part_rows, traced_ms, unknown_work
from .schedule import ENDLESS, WATCHED
from .timeline import COUNTED, NODE, CountedInOrder, StepTimes, nearest_call, step_times, traced_step
from .trace.analyse import steps_of
from .trace.idle import collectives, device_times, lateness, transfers, waits_for_device
from .trace.nesting import NONE, Nesting, TracedSteps, spread
from .trace.read import PART, STEP, STEP_OF_TORCH
from .trace.record import Recording

_CALIBRATION = 400
_LOADER = "enumerate(DataLoader)"
"""Begins the region that torch records around the next batch."""


@lru_cache(maxsize=1)
def event_cost() -> tuple[float, float]:
    """(us that recording one operator adds outside of it, part of a call's cost that is inside the operator)."""
    one = torch.ones(16)

    def calls() -> float:
        began = perf_counter_ns()
        for _ in range(_CALIBRATION):
            one + one
        return (perf_counter_ns() - began) / _CALIBRATION / 1e3

    calls()
    plain = min(calls() for _ in range(5))
    recording = Recording(cuda=False)
    calls()
    traced = min(calls() for _ in range(3))
    lengths = recording.durations_us()
    inside = median(lengths) if lengths else 0.65 * plain
    return max(0.0, traced - plain), min(0.95, max(0.3, inside / plain))


def timing_ns(observer: Observer) -> float:
    """ns that timing one step and one wait for input costs, measured on an observer of its own."""
    probe = Observer(cache_sizes=observer.cache_sizes)
    # However slow the machine is: a probe that counted operators would go on in this thread.
    probe.schedule.counts = Counts(0, ENDLESS, 0, 0)
    probe.cuda, probe.state = False, "watching" if observer.light else "plain"
    count = 25 * WATCHED
    began = perf_counter_ns()
    for _ in range(count):
        with probe.waiting_for_input():
            pass
        probe.end_step()
    spent = (perf_counter_ns() - began) / count
    probe.clock.close()
    return spent


def observed(observer: Observer, kernels: dict[str, CallWork] | None = None) -> Observed:
    """The figures of a step, in ms; see attribution.py for how they are divided.

    `kernels` is the work of a launch by the name of the kernel, for kernels of CUDA graphs, which no operator launched.
    """
    plain = [step.whole for step in observer.plain]
    walls = [(moment.wall - moment.waiting) / 1e6 for moment in plain]
    typical = spread(walls)
    step_ms = typical.p50
    # Shares are those of all steps, since waits come in some of them only; times are those of the median step.
    per_step = 1e-6 * step_ms / (sum(walls) or 1.0)
    # The system counts waits for a core in steps of its own: beside other work a short wait may seem to be less than 0.
    input_ms = per_step * max(0, sum(step.input.wall - step.input.waiting for step in observer.plain))
    ranks_ms = per_step * max(0, sum(step.ranks.wall - step.ranks.waiting for step in observer.plain))
    off_ms = per_step * sum(max(0, step.whole.off - step.input.off - step.ranks.off) for step in observer.plain)
    # A thread that loses its core while it reads its clocks may see a longer wait than step.
    own_ms = max(0.0, step_ms - input_ms - ranks_ms)
    overhead_ns = timing_ns(observer)
    waiting = sum(moment.waiting for moment in plain)
    preempted = waiting / max(1, sum(moment.wall for moment in plain)) if observer.clock.tells_waiting else None
    counted = len(observer.counter.steps) if observer.counter else 0
    result = Observed(
        device="cpu",
        threads=observer.threads,
        steps=ObservedSteps(observer.seen, len(plain), len(observer.traced), counted),
        step_ms=typical,
        other_work=observer.others,
        preempted=preempted,
        overhead=TimingCost(overhead_ns, overhead_ns / 1e6 / step_ms if step_ms else 0.0),
        waits={"input": input_ms, "communication": ranks_ms},
        input_cores=sum(step.input.process for step in observer.plain)
        / max(1, sum(step.input.wall for step in observer.plain)),
        operators=[],
        notes=list(observer.notes),
    )
    if observer.trace is None or not observer.traced:
        result.notes.append("no step was traced: operators are not known")
        # A thread that is off its core may wait inside an operator.
        result.waits["unknown"] = own_ms
        return result
    works = observer.counter.result() if observer.counter else []
    cost_us, result.inside = event_cost()
    nesting, window, times = _traced(observer, works, cost_us)
    if window.work:
        _on_device(result, observer, nesting, window, times, off_ms, kernels or {})
    else:
        _on_host(result, observer, times, works, own_ms, off_ms)
    result.operators = operator_rows(times, works, window)
    result.traced_ms = [ms * (result.scale or 1.0) for ms in traced_ms(window)]
    result.timeline = traced_step(nesting, window, times, result.operators)
    result.varies = _varies(observer)
    add_samples(result, observer)
    if observer.counter is not None:
        result.memory = observer.counter.memory.result(around_steps(observer))
        if result.memory and observer.growth and not result.memory[0].growth:
            result.memory[0].growth = observer.growth
    result.notes += [*unknown_work(result.operators), *lateness(collectives(nesting, window))]
    result.parts = part_rows(result.operators)
    return result


def _varies(observer: Observer) -> dict[str, float]:
    """How much the waits of the timed steps may differ from their means."""
    walls = [float(step.whole.wall) for step in observer.plain]
    waits = {
        "input": [float(step.input.wall) for step in observer.plain],
        "communication": [float(step.ranks.wall) for step in observer.plain],
        "blocked": [float(max(0, step.whole.off - step.input.off - step.ranks.off)) for step in observer.plain],
    }
    result = {}
    for name, parts in waits.items():
        low, high = of_steps(parts, walls)
        mean = sum(parts) / (sum(walls) or 1.0)
        result[name] = min(1.0, (high - low) / 2 / mean) if mean else 0.0
    return result


def _traced(observer: Observer, works: list[CallWork], event_us: float = 0.0) -> tuple[Nesting, TracedSteps, StepTimes]:
    assert observer.trace is not None
    nesting, window = steps_of(observer.trace)
    counted = CountedInOrder(nesting, works)
    times = step_times(observer.trace, nesting, window, counted, Parts(nesting).of, event_us)
    name_places(nesting, times.calls, observer_places(observer))
    return nesting, window, times


def _on_host(
    result: Observed,
    observer: Observer,
    times: StepTimes,
    works: list[CallWork],
    own_ms: float,
    off_ms: float,
) -> None:
    """Scale the traced times to the plain steps, which no profiler slowed; `divided` has the equations."""
    crowd = observer.threads / usable_cores() + observer.workers - 1
    result.crowded = min(observer.workers, max(0.0, crowd))
    steps, traced = 1e3 * times.steps, observer.traced
    cut = clip(times) / steps
    # The pages of a file may be read in some steps and be there in others: as in the counted step, by shares.
    stuck = sum(call.us * call.work.blocked for call in times.calls if call.work) / steps
    for call in times.calls:
        call.us *= 1 - (call.work.blocked if call.work else 0.0)
    samples = observer.sampler.samples
    sampled, _ = observer.sampler.times(observer.counter.positions if observer.counter else ())
    seen_off = sum(one.ns for one in sampled if one.limit == "blocked")
    clocks = HostClocks(
        own=own_ms,
        off=off_ms,
        sampled_off=own_ms * seen_off / sum(one.wall for one in samples) if len(samples) >= FEWEST else None,
        outside=times.outside_us / steps,
        collectives=times.communication_us / steps,
        beside=times.beside_us / steps,
        inside=sum(call.us for call in times.calls) / steps,
        stuck=stuck,
        cut=cut,
        traced_off=sum(one.off for one in traced) / len(traced) / 1e6,
        waited_off=sum(work.off_ns for work in works) / 1e6,
        preempted=sum(one.waiting for one in traced) / max(1, sum(one.wall for one in traced)),
    )
    parts = divided(clocks)
    for call in times.calls:
        call.us *= parts.scale
    result.waits["communication"] += parts.communication
    result.waits |= {"blocked": parts.blocked, "python": parts.python}
    # C code that runs for so long is not slowed by a trace.
    result.long_python_ms = min(parts.python, times.long_us / steps)
    python = parts.python / times.outside_us if times.outside_us else 0.0
    result.optimizer_python = {region_name(name): us * python for name, us in times.optimizer_us.items()}
    result.scale = parts.slowed


def _on_device(
    result: Observed,
    observer: Observer,
    nesting: Nesting,
    window: TracedSteps,
    times: StepTimes,
    off_ms: float,
    graph_works: dict[str, CallWork],
) -> None:
    """Device times are those of the trace; idle times are scaled to the plain steps, whose host was not slowed."""
    device = device_times(nesting, window)
    steps = times.steps
    blocks = [ns / count / 1e6 for count, ns in observer.blocks.times]
    if blocks:
        # The first block is a single step.
        result.step_ms = spread(blocks[1:] or blocks)
    busy = device.busy_us / 1e3 / steps
    waits = {name: us / 1e3 / steps for name, us in device.waits.items()}
    idle = {name: waits.get(name, 0.0) for name in ("input", "sync", "launch", "python", "dispatch", "blocked")}
    left = max(0.0, result.step_ms.p50 - busy)
    scale = left / sum(idle.values()) if sum(idle.values()) > 0 else 0.0
    idle = {name: ms * min(scale, 1.0 if name == "dispatch" else scale) for name, ms in idle.items()}
    blocked = min(idle["python"], max(0.0, off_ms - times.beside_us / 1e3 / steps))
    idle["python"] -= blocked
    blocked += idle.pop("blocked")
    result.device = torch.cuda.get_device_name()
    result.waits = {
        **idle, "blocked": blocked,
        "transfer": waits.get("transfer", 0.0), "communication": waits.get("communication", 0.0),
    }  # fmt: skip
    result.host_ms = _host_ms(observer, nesting, window, result.step_ms.p50)
    result.long_python_ms = times.long_us / 1e3 / steps
    result.pageable_bytes = sum(row.bytes for row in transfers(window) if row.pinned is False)
    times.on_device(nesting, device, graph_works)


def _host_ms(observer: Observer, nesting: Nesting, window: TracedSteps, most: float) -> float:
    """Time of the host in a step without its waits. The fastest steps found room in the queue of the device."""
    own = sorted(step.whole.wall - step.input.wall - step.ranks.wall for step in observer.plain)
    # The driver copies memory that is not pinned by itself, inside of the call.
    copies = {work.correlation for work in window.work if work.kind == "copy" and "Pageable" in work.name}
    calls = (
        index for index, event in enumerate(nesting.events) if event.kind == "call" and event.correlation in copies
    )
    waits = [nesting.events[index] for index in {*waits_for_device(nesting, window), *calls}]
    waited = sum(call.end - call.start for call in waits if call.thread == nesting.thread and window.holds(call.start))
    return min(most, max(0.0, own[len(own) // 5] / 1e6 - waited / 1e3 / window.count))


def kernel_works(observer: Observer) -> dict[str, CallWork]:
    """The mean work of a launch by the name of the kernel; the work of an operator is divided among its kernels by
    their time."""
    if observer.trace is None or observer.counter is None:
        return {}
    nesting, window, times = _traced(observer, observer.counter.result())
    owner = nearest_call(nesting, times.calls)
    launched: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
    works: dict[int, CallWork | None] = {}
    for work in window.activity:
        call = owner(nesting.above(nesting.origin(work), "op")) if work.kind == "kernel" else None
        if call is not None:
            works[call.index] = call.work
            launched[call.index].append((work.name, work.end - work.start))
    sums: defaultdict[str, list[Any]] = defaultdict(list)
    for key, names in launched.items():
        whole = sum(us for _, us in names) or 1.0
        for name, us in names:
            sums[name].append((works[key], us / whole))
    means = {name: CallWork(name) for name in sums}
    for name, mean in means.items():
        counted = [(work, share) for work, share in sums[name] if work is not None]
        for figure in COUNTED:
            whole = sum(getattr(work, figure) * share for work, share in counted)
            setattr(mean, figure, round(whole / len(sums[name])))
        for fact in ("precision", "row_bytes", "table_rows"):
            setattr(mean, fact, max((getattr(work, fact) for work, _ in counted), default=getattr(mean, fact)))
    return means


class Parts:
    """The part of the program that every event belongs to: a span, a named region or a module.

    A node of the backward pass belongs to the part whose forward pass created it.
    """

    def __init__(self, nesting: Nesting) -> None:
        self.nesting = nesting
        self._names = [self._range(index) for index in range(len(nesting.events))]
        self._forward: dict[int, str] = {}
        for index, event in enumerate(nesting.events):
            if event.kind == "op" and event.sequence is not None:
                name = self._names[index]
                if name not in (None, "data") and not name.startswith(_LOADER) and nesting.outer(index, NODE) == NONE:
                    self._forward[event.sequence] = name

    def of(self, index: int) -> str | None:
        node = self.nesting.outer(index, NODE)
        if node != NONE:
            sequence = self.nesting.events[node].sequence
            forward = self._forward.get(sequence) if sequence is not None else None
            if forward is not None:
                return f"{forward}, backward"
        return self._names[index]

    def _range(self, index: int) -> str | None:
        while index != NONE:
            event = self.nesting.events[index]
            if event.kind == "range" and not event.name.startswith((STEP, STEP_OF_TORCH)):
                return region_name(event.name)
            index = self.nesting.parent[index]
        return None


def region_name(name: str) -> str:
    """The name of a region as its author knows it."""
    for prefix in (PART, MODULE, "Optimizer.step#", "Optimizer.zero_grad#"):
        if name.startswith(prefix):
            return ("optimizer " if prefix.startswith("Optimizer") else "") + name.removeprefix(prefix)
    return name


@dataclass(frozen=True, kw_only=True)
class HostClocks:
    """What was measured of plain steps and of traced ones, in ms of one step."""

    own: float
    """Of a plain step, without its waits for input and in exchanges of ranks."""
    off: float
    """Of it, the time in which the thread was off its core, but not because other work had it."""
    sampled_off: float | None
    """The same outside of operators, by samples of the stack of all steps; None: there are too few."""
    outside: float
    """Of a traced step: its thread runs no operator, and waits for nothing that the trace shows."""
    collectives: float
    """Its thread waits in collectives."""
    beside: float
    """Only other threads run operators."""
    inside: float
    """Its operators, without `stuck` and `cut`."""
    stuck: float
    """They wait for pages of a file or of swap space, by the share that a counted step tells."""
    cut: float
    """What was cut of single calls, because other work had their core meanwhile."""
    traced_off: float
    """The thread of a traced step was off its core."""
    waited_off: float
    """The same while operators waited for threads of their own, by a counted step."""
    preempted: float
    """Share of the traced time in which other work had the core."""


@dataclass(frozen=True, kw_only=True)
class HostParts:
    """The parts of a plain step in ms; they add up to `own`."""

    communication: float
    blocked: float
    python: float
    operators: float
    scale: float
    """Times of a plain step over those of the traced one, by which each operator is scaled."""
    slowed: float
    """The same without the time that other work took from either."""


def divided(step: HostClocks) -> HostParts:
    """The parts of a plain step.

    A plain step is as long as its user sees it, but only its clocks are known. A traced step is slower, and its
    operators are known. In ms of one step, the thread of a plain step does this:

        |<----------------------- own ----------------------->|   without waits for input, and in exchanges of ranks
        | communication | blocked | python |    operators     |
                                  |<--------- rest ---------->|

    and that of a traced one:

        |<--- outside --->|<----- others ----->|<--- inside --->|<-- stuck -->|
        | no operator     | collectives, or    | operators      | operators that wait for a page of a file
                          | beside: only other                      or of swap space
                            threads run operators

    `communication` and `blocked` are measured. The rest is divided as the traced step is: python to operators as what
    the interpreter took outside of operators to the time inside them.
    """
    others = step.collectives + step.beside
    # The thread is off its core while it waits for others, and while an operator waits for its own threads: by what
    # was counted, or beside other work by what a traced thread was off and cannot have been outside of operators.
    explained = others + max(step.waited_off, step.traced_off - others - step.stuck - step.outside)
    # Outside of operators it is off for no longer than traced steps are there, or than samples of all steps tell.
    most = step.outside + step.stuck + (step.off if step.sampled_off is None else step.sampled_off)
    communication = min(step.own, step.collectives)
    blocked = min(step.own - communication, max(0.0, min(step.off - explained, most)))
    rest = step.own - communication - blocked
    # Of the time outside of operators the interpreter has what the thread was on its core, and other work took the
    # core at moments that do not depend on what it ran.
    cut = step.cut / max(1e-9, step.inside + step.cut)
    interpreter = max(0.0, step.outside - max(0.0, step.traced_off - explained - step.stuck))
    interpreter *= 1 - min(step.preempted, cut)
    traced = interpreter + step.inside
    scale = rest / traced if traced > 0 else 0.0
    return HostParts(
        communication=communication,
        blocked=blocked,
        python=interpreter * scale if traced > 0 else rest,
        operators=step.inside * scale,
        scale=scale,
        slowed=scale / max(1e-9, 1 - max(0.0, step.preempted - cut)),
    )
