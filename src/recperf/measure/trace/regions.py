"""Times of the parts of a step (named regions, modules), per step and for every single step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ..profile_records import Missing, TracedPart
from .nesting import NONE, Innermost, Nesting
from .read import Host, Trace
from .records import ModuleTime
from .window import TracedSteps, per_step

OTHER = "other"
_MODULE = "nn.Module: "
_BACKWARD = "autograd::"


def parts(nesting: Nesting, window: TracedSteps) -> list[TracedPart]:
    """Time of every part on the host, with and without inner parts, and on the device; `other` is outside of all."""
    own: defaultdict[str, float] = defaultdict(float)
    total: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    launches: defaultdict[str, int] = defaultdict(int)
    covered = 0.0
    for index, outer, length in _regions(nesting, window):
        name = nesting.part[index] or OTHER
        own[name] += length
        calls[name] += 1
        if outer == NONE:
            covered += length
        else:
            own[nesting.part[outer] or OTHER] -= length
        total[name] += length if outer == NONE or nesting.part[outer] != name else 0.0
    for index, event in enumerate(nesting.events):
        if event.kind == "call" and "Launch" in event.name and window.holds(event.start):
            launches[nesting.part[index] or OTHER] += 1
    own[OTHER] += window.host_us - covered
    total[OTHER] += window.host_us - covered
    device: defaultdict[str, float] = defaultdict(float)
    kernels: defaultdict[str, int] = defaultdict(int)
    for work in window.work:
        name = nesting.part_of(nesting.origin(work)) or OTHER
        device[name] += work.end - work.start
        kernels[name] += work.kind == "kernel"
    names = _as_tree(name for name in (*own, *device) if name != OTHER)
    scale = 1e3 * window.count
    return [
        TracedPart(
            name=name,
            calls=per_step(calls[name], window.count),
            host_ms=own[name] / scale,
            total_ms=total[name] / scale,
            device_ms=device[name] / scale if window.work else None,
            kernels=per_step(kernels[name], window.count),
            launches=per_step(launches[name], window.count),
        )
        for name in [*names, OTHER]
    ]


def _regions(nesting: Nesting, window: TracedSteps) -> Iterable[tuple[int, int, float]]:
    """(region, the region around it or NONE, length) of the step's thread, inside steps."""
    inside: set[int] = set()
    for index, event in enumerate(nesting.events):
        if nesting.region[index] == index and event.thread == nesting.thread and window.holds(event.start):
            above = nesting.parent[index]
            outer = nesting.region[above] if above != NONE else NONE
            inside.add(index)
            yield index, outer if outer in inside else NONE, event.end - event.start


def _as_tree(names: Iterable[str]) -> list[str]:
    """Names in the order in which they were met, but inner regions (`outer/inner`) right after their outer one."""
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}

    def key(name: str) -> list[int]:
        words = name.split("/")
        prefixes = ("/".join(words[:count]) for count in range(1, len(words)))
        return [*(order[prefix] for prefix in prefixes if prefix in order), order[name]]

    return sorted(order, key=key)


class Modules:
    """The frames of `torch.nn.Module` that the profiler records with stacks, and the module of every operator."""

    def __init__(self, trace: Trace, nesting: Nesting) -> None:
        self.nesting = nesting
        frames: defaultdict[str, list[Host]] = defaultdict(list)
        for frame in trace.python:
            if frame.name.startswith(_MODULE):
                frames[frame.thread].append(frame)
        self.frames = {thread: Innermost(own, nesting.rounding) for thread, own in frames.items()}
        self.paths = {thread: _paths(frames) for thread, frames in self.frames.items()}
        self._forward: dict[int, int] = {}
        """The operator of the forward pass by its sequence number; of several the innermost, which comes last."""
        for index, event in enumerate(nesting.events if self.frames else ()):
            if event.sequence is not None and event.kind == "op" and self.backward(index) == NONE:
                self._forward[event.sequence] = index

    def backward(self, index: int) -> int:
        """The operator of autograd around an event, as an index, or NONE."""
        top = self.nesting.outermost(index, "op")
        return top if top != NONE and self.nesting.events[top].name.startswith(_BACKWARD) else NONE

    def of(self, index: int) -> str | None:
        """The module that an event belongs to: around it, or for the backward pass, that of the forward operator."""
        if index == NONE or not self.frames:
            return None
        top = self.backward(index)
        if top != NONE:
            sequence = self.nesting.events[top].sequence
            index = NONE if sequence is None else self._forward.get(sequence, NONE)
            if index == NONE:
                return None
        event = self.nesting.events[index]
        if event.thread not in self.frames:
            return None
        at = self.frames[event.thread].index(event.start)
        return None if at == NONE else self.paths[event.thread][at]


def _paths(frames: Innermost) -> list[str]:
    paths: list[str] = []
    for frame, above in zip(frames.events, frames.parent):
        name = frame.name.removeprefix(_MODULE)
        paths.append(name if above == NONE else f"{paths[above]}/{name}")
    return paths


def modules(trace: Trace, nesting: Nesting, window: TracedSteps) -> list[ModuleTime] | Missing:
    """Time of every module on the host, forward (with and without inner modules) and backward, and on the device."""
    known = Modules(trace, nesting)
    if not known.frames:
        return Missing("the trace has no modules; with_stack=True records them")
    own: defaultdict[str, float] = defaultdict(float)
    total: defaultdict[str, float] = defaultdict(float)
    backward: defaultdict[str, float] = defaultdict(float)
    device: defaultdict[str, float] = defaultdict(float)
    for thread, frames in known.frames.items():
        for frame, above, path in zip(frames.events, frames.parent, known.paths[thread]):
            if window.holds(frame.start):
                own[path] += frame.end - frame.start
                total[path] += frame.end - frame.start
                if above != NONE:
                    own[known.paths[thread][above]] -= frame.end - frame.start
    for index, event in enumerate(nesting.events):
        if event.kind == "op" and window.holds(event.start) and known.backward(index) == index:
            backward[known.of(index) or OTHER] += event.end - event.start
    for work in window.work:
        device[known.of(nesting.origin(work)) or OTHER] += work.end - work.start
    scale = 1e3 * window.count
    return [
        ModuleTime(
            name=name,
            host_ms=own[name] / scale,
            total_ms=total[name] / scale,
            backward_ms=backward[name] / scale,
            device_ms=device[name] / scale if window.work else None,
        )
        for name in _as_tree(name for name in (*own, *backward, *device) if name != OTHER)
    ]


def timings(nesting: Nesting, window: TracedSteps, own: dict[int, float]) -> dict[str, dict[str, list[float]]]:
    """Milliseconds in every single step: operators without inner operators, kernels, regions.

    `own` is the time of every operator without inner operators, by index.
    """
    tables: dict[str, defaultdict[str, list[float]]] = {
        kind: defaultdict(lambda: [0.0] * window.count) for kind in ("operators", "kernels", "regions")
    }

    def add(kind: str, name: str, step: int, time: float) -> None:
        if step != NONE:
            tables[kind][name][step] += time / 1e3

    for index, time in own.items():
        add("operators", nesting.events[index].name, window.step(nesting.events[index].start), time)
    for work in window.work:
        add("kernels", work.name, window.step_of(work), work.end - work.start)
    for index, outer, length in _regions(nesting, window):
        name = nesting.part[index] or OTHER
        if outer == NONE or nesting.part[outer] != name:
            add("regions", name, window.step(nesting.events[index].start), length)
    return {kind: dict(table) for kind, table in tables.items()}
