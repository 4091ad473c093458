"""Turns what an observer saw into plain figures about a step: waits, operators with their time and counted work."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from ..machine import usable_cores
from .attribution import kind_of_call, limit_of_kernel
from .counting import Work
from .device_times import device_times
from .observing import Observer
from .step_parts import Parts, part_rows
from .step_ranges import Recording
from .timeline import Call, StepTimes, step_times
from .trace.nesting import NONE, Nesting
from .trace.read import Host
from .trace.record import PART, STEP
from .trace.window import Window
from .trace.work import flops, moved

GRAPH = "CUDA graph"
FUSED = ("CompiledFxGraph", "Torch-Compiled Region", "triton_")
"""Parts of the names under which the work of fused operators appears."""
_CALIBRATION = 400
OUTLIER = 4.0
"""A call that took this many times the median of its like was interrupted."""
MOST_ROWS = 60
"""Operators of a stored profile; the rest are joined."""
COUNTED = ("flops", "special", "bytes", "beyond", "fresh", "rows", "missed", "distinct")
"""The counted work of an operator."""


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


def observed(observer: Observer, kernels: dict[str, Work] | None = None) -> dict[str, Any]:
    """The figures of a step, in ms; see attribution.py for how they are divided.

    `kernels` is the work of a launch by the name of the kernel, for kernels of CUDA graphs, which no operator launched.
    """
    plain, inputs = observer.plain, observer.plain_input
    count = max(1, len(plain))
    walls = [(moment.wall - moment.waiting) / 1e6 for moment in plain]
    step_ms = sum(walls) / count
    input_ms = sum(moment.wall - moment.waiting for moment in inputs) / count / 1e6
    ranks_ms = sum(moment.wall - moment.waiting for moment in observer.plain_ranks) / count / 1e6
    off_ms = sum(max(0, m.off - i.off - r.off) for m, i, r in zip(plain, inputs, observer.plain_ranks)) / count / 1e6
    overhead_ns = observer.cost_per_step()
    result: dict[str, Any] = {
        "device": "cpu",
        "threads": observer.threads,
        "steps": {"seen": observer.seen, "plain": len(plain), "traced": len(observer.traced)},
        "step_ms": _spread([moment.wall / 1e6 for moment in plain]),
        "other_work": observer.others,
        "preempted": sum(m.waiting for m in plain) / max(1, sum(m.wall for m in plain)),
        "overhead": {"ns": overhead_ns, "share": overhead_ns / 1e6 / step_ms if step_ms else 0.0},
        "waits": {"input": input_ms, "communication": ranks_ms},
        "operators": [],
        "parts": [],
        "notes": list(observer.notes),
    }
    if observer.trace is None or not observer.traced:
        result["notes"].append("no step was traced: operators are not known")
        # A thread that is off its core may wait inside an operator.
        result["waits"]["unknown"] = max(0.0, step_ms - input_ms - ranks_ms)
        return result
    works = observer.counter.result() if observer.counter else []
    result["steps"]["counted"] = len(observer.counter.steps) if observer.counter else 0
    cost_us, result["inside"] = event_cost()
    nesting = Nesting(observer.trace, steps_name=STEP, parts_prefix=PART)
    window = Window(observer.trace, nesting)
    parts = Parts(nesting)
    times = step_times(nesting, window, works, parts.of, cost_us)
    clipped_ms = _clip(times) / 1e3 / times.steps
    if window.work:
        _on_device(result, observer, nesting, window, times, off_ms, kernels or {})
    else:
        _on_host(result, observer, times, works, step_ms - input_ms - ranks_ms, off_ms, clipped_ms)
    result["operators"] = rows(times, works)
    result["parts"] = part_rows(result["operators"])
    return result


def _on_host(
    result: dict[str, Any],
    observer: Observer,
    times: StepTimes,
    works: list[Work],
    own_ms: float,
    off_ms: float,
    clipped_ms: float,
) -> None:
    """Scale the traced times to the plain steps, which no profiler slowed; `own_ms` is a step without waits for input
    and for other ranks."""
    crowd = observer.threads / usable_cores() + observer.workers - 1
    result["crowded"] = min(observer.workers, max(0.0, crowd))
    in_operators = sum(work.off_ns for work in works) / 1e6
    beside = times.beside_us / 1e3 / times.steps
    # A thread that waits inside an operator waits for the operator's own threads.
    blocked = max(0.0, off_ms - in_operators - beside)
    traced_off = sum(moment.off for moment in observer.traced) / len(observer.traced) / 1e6
    outside = times.outside_us / 1e3 / times.steps
    python = max(0.0, outside - max(0.0, traced_off - in_operators - beside))
    inside = sum(call.us for call in times.calls) / 1e3 / times.steps
    # Other work took the thread's core at moments that do not depend on what it ran.
    waiting = sum(moment.waiting for moment in observer.traced) / max(1, sum(moment.wall for moment in observer.traced))
    python *= 1 - min(waiting, clipped_ms / max(1e-9, inside + clipped_ms))
    rest = max(0.0, own_ms - blocked)
    scale = rest / (python + inside) if python + inside > 0 else 0.0
    for call in times.calls:
        call.us *= scale
    result["waits"] |= {"blocked": blocked, "python": python * scale}
    result["scale"] = scale


def _on_device(
    result: dict[str, Any],
    observer: Observer,
    nesting: Nesting,
    window: Window,
    times: StepTimes,
    off_ms: float,
    graph_works: dict[str, Work],
) -> None:
    """Device times are those of the trace; idle times are scaled to the plain steps, whose host was not slowed."""
    device = device_times(nesting, window)
    steps = times.steps
    blocks = [ns / count / 1e6 for count, ns in observer.blocks]
    # The first block is a single step.
    step_ms = median(blocks[1:] or blocks) if blocks else result["step_ms"]["p50"]
    busy = device.busy_us / 1e3 / steps
    waits = {name: us / 1e3 / steps for name, us in device.waits.items()}
    idle = {name: waits.get(name, 0.0) for name in ("input", "sync", "launch", "python", "dispatch")}
    left = max(0.0, step_ms - busy)
    scale = left / sum(idle.values()) if sum(idle.values()) > 0 else 0.0
    idle = {name: ms * min(scale, 1.0 if name == "dispatch" else scale) for name, ms in idle.items()}
    beside = times.beside_us / 1e3 / steps
    blocked = min(idle["python"], max(0.0, off_ms - beside))
    idle["python"] -= blocked
    result["step_ms"] = _spread(blocks[1:] or blocks) if blocks else result["step_ms"]
    result["device"] = torch.cuda.get_device_name()
    result["waits"] = {
        **idle, "blocked": blocked,
        "transfer": waits.get("transfer", 0.0), "communication": waits.get("communication", 0.0),
    }  # fmt: skip
    result["busy_ms"] = busy
    by_event = {id(call.event): call for call in times.calls}
    owners = _owners(nesting, by_event)
    extra: list[Call] = []
    for origin, (us, kernels) in device.by_origin.items():
        call = owners(origin)
        if call is None:
            name = nesting.events[origin].name if origin != NONE else "(launched outside of the steps)"
            call = Call(name, None, 0.0, None, False, _NO_EVENT)
            extra.append(call)
        call.device_us += us
        call.kernels += kernels
    for name, (us, kernels) in device.graph.items():
        work = _times(graph_works[name], kernels) if name in graph_works else None
        extra.append(Call(name, GRAPH, 0.0, work, False, _NO_EVENT, us, kernels))
    times.calls = [call for call in [*times.calls, *extra] if call.device_us > 0]
    for call in times.calls:
        call.us = call.device_us


_NO_EVENT = Host("op", "", 0.0, 0.0, "", None, None, None)


def _owners(nesting: Nesting, by_event: dict[int, Call]) -> Any:
    """A function from an event to the nearest call at or above it that was timed."""

    def owner(index: int) -> Call | None:
        while index != NONE:
            call = by_event.get(id(nesting.events[index]))
            if call is not None:
                return call
            index = nesting.parent[index]
        return None

    return owner


def _clip(times: StepTimes) -> float:
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


def kernel_works(observer: Observer) -> dict[str, Work]:
    """The mean work of a launch by the name of the kernel; the work of an operator is divided among its kernels by
    their time."""
    if observer.trace is None or observer.counter is None:
        return {}
    nesting = Nesting(observer.trace, steps_name=STEP, parts_prefix=PART)
    window = Window(observer.trace, nesting)
    times = step_times(nesting, window, observer.counter.result(), Parts(nesting).of, 0.0)
    owners = _owners(nesting, {id(call.event): call for call in times.calls})
    launched: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
    calls: dict[int, Call] = {}
    for work in window.activity:
        call = owners(nesting.above(nesting.origin(work), "op")) if work.kind == "kernel" else None
        if call is not None:
            calls[id(call)] = call
            launched[id(call)].append((work.name, work.end - work.start))
    sums: defaultdict[str, list[Any]] = defaultdict(list)
    for key, names in launched.items():
        whole = sum(us for _, us in names) or 1.0
        for name, us in names:
            sums[name].append((calls[key].work, us / whole))
    return {name: _mean_work(name, shares) for name, shares in sums.items()}


def _mean_work(name: str, shares: list[Any]) -> Work:
    mean = Work(name)
    counted = [(work, share) for work, share in shares if work is not None]
    for figure in COUNTED:
        setattr(mean, figure, round(sum(getattr(work, figure) * share for work, share in counted) / len(shares)))
    for fact in ("precision", "row_bytes", "table_rows"):
        setattr(mean, fact, max((getattr(work, fact) for work, _ in counted), default=getattr(mean, fact)))
    return mean


def _times(work: Work, count: int) -> Work:
    return replace(work, **{figure: count * getattr(work, figure) for figure in COUNTED})


def compact(figures: dict[str, Any], most: int = MOST_ROWS) -> dict[str, Any]:
    """The figures with at most so many operators; the smaller ones are joined by their kind."""
    operators = figures["operators"]
    rest: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in operators[most:]:
        kind = row["kind"], bool(row["kernels"]), row.get("by_name"), bool(row.get("communication"))
        rest[*kind, row["precision"], row["row_bytes"]].append(row)
    joined = [{**group[0], **_joined(group)} for group in rest.values()]
    return {**figures, "operators": [*operators[:most], *joined]}


def _joined(group: list[dict[str, Any]]) -> dict[str, Any]:
    if len(group) == 1:
        return {}
    summed = ("calls", "python_calls", "ms", "kernels", *COUNTED)
    return {
        "name": f"{len(group)} smaller operators ({group[0]['kind']})",
        "part": None,
        **{name: sum(row[name] for row in group) for name in summed},
        "counted": all(row["counted"] for row in group),
    }


def rows(times: StepTimes, works: list[Work]) -> list[dict[str, Any]]:
    """Operators per step, those of equal name, part and size of work together."""
    fused = _fused(times, works)
    steps = times.steps
    table = []
    for (name, part, *_), members in _groups(times, fused).items():
        calls = [call for call, _ in members]
        counted = [work for _, work in members if work is not None]
        row: dict[str, Any] = {
            "name": name,
            "part": part,
            "kind": kind_of_call(name),
            "calls": len(members) / steps,
            "python_calls": sum(call.python for call in calls) / steps,
            "ms": sum(call.us for call in calls) / 1e3 / steps,
            "kernels": sum(call.kernels for call in calls) / steps,
        }
        if part == GRAPH:
            row["by_name"] = limit_of_kernel(name)
        for figure in COUNTED:
            row[figure] = sum(getattr(work, figure) for work in counted) / steps
        for fact in ("precision", "row_bytes", "table_rows"):
            row[fact] = next((getattr(work, fact) for work in counted if getattr(work, fact)), None)
        row["parallel"] = max(call.parallel for call in calls)
        row["counted"] = len(counted) == len(members)
        if any(id(call) in fused for call in calls):
            row["fused"] = True
        table.append(row)
    table.sort(key=lambda row: -row["ms"])
    return table


def _groups(times: StepTimes, fused: dict[int, Work]) -> dict[tuple[Any, ...], list[tuple[Call, Any]]]:
    """Calls of equal name, part and size of work."""
    groups: defaultdict[tuple[Any, ...], list[tuple[Call, Any]]] = defaultdict(list)
    for call in times.calls:
        work = call.work or fused.get(id(call)) or (_from_shapes(call.event) if call.beside else None)
        sizes = (_magnitude(getattr(work, name, 0)) for name in ("flops", "bytes", "beyond", "rows"))
        groups[call.name, call.part, *sizes].append((call, work))
    return groups


def _fused(times: StepTimes, works: list[Work]) -> dict[int, Work]:
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
        work = Work(call.name)
        for figure in ("flops", "special", "bytes", "beyond", "rows", "missed"):
            setattr(work, figure, round(share * sum(getattr(item, figure) for item in hidden)))
        work.row_bytes = max((item.row_bytes for item in hidden), default=0)
        result[id(call)] = work
    return result


def _from_shapes(event: Host) -> Work | None:
    """Work from the recorded sizes, for operators of threads that the counting did not see."""
    arithmetic, size = flops(event.name, event.shapes), moved(event.name, event.shapes)
    if arithmetic is None and size is None:
        return None
    return Work(event.name, flops=arithmetic or 0, precision="float32", bytes=size or 0)


def _magnitude(value: float) -> int:
    return int(value).bit_length()


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"p20": 0.0, "p50": 0.0, "p80": 0.0}
    ordered = torch.tensor(values, dtype=torch.float64)
    p20, p50, p80 = torch.quantile(ordered, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return {"p20": p20, "p50": p50, "p80": p80}
