"""Parts of traced steps, which are named regions and modules, and places in the user's program. Torch-free.

Modules and places come from the Python stacks of a trace (with_stack=True). The profiler records the line at which a
function begins, not the one that it executes.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ..places import LIBRARY, USER, Frame, Stack, place_in, surrounding
from ..profile_records import TracedPart
from ..records import Place
from .nesting import NONE, Cover, Innermost, Nesting, TracedSteps, per_step
from .read import Host, Trace, grouped, summed

OTHER = "other"
LIBRARIES = re.compile(
    "accelerate|datasets|deepctr_torch|deepspeed|einops|fbgemm_gpu|ignite|joblib|keras|lightning|lightning_fabric|"
    "matplotlib|numpy|pandas|PIL|polars|pyarrow|pytorch_lightning|recbole|scipy|sklearn|tensorflow|timm|tokenizers|"
    "torch_geometric|torchmetrics|torchrec|torchvision|tqdm|transformers|typing_extensions|wandb|xformers"
)
"""Packages that programs use: a trace names files from the folder of their import, wherever that is."""
_FRAME = re.compile(r"(?P<file>[^<].*\.py|<ipython.*>)\((?P<line>\d+)\): (?P<function>.+)")


_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_RUNS_BACKWARD = "_engine_run_backward"


class _Rows(dict[str, TracedPart]):
    """Times of regions in us, by name."""

    def __missing__(self, name: str) -> TracedPart:
        return self.setdefault(name, TracedPart(name, 0, 0.0, 0.0, 0.0, 0))

    def per_step(self, window: TracedSteps) -> list[TracedPart]:
        """Rows in ms per step in the order in which they were met, but inner regions (`outer/inner`) right after their
        outer one, and what is in none at the end."""
        order = {name: place for place, name in enumerate(self)}

        def key(name: str) -> list[int]:
            words = name.split("/")
            prefixes = ("/".join(words[:count]) for count in range(1, len(words)))
            return [*(order[prefix] for prefix in prefixes if prefix in order), order[name]]

        scale = 1e3 * window.count
        for row in self.values():
            row.calls, row.kernels = (per_step(int(count), window.count) for count in (row.calls, row.kernels))
            row.host_ms, row.total_ms = row.host_ms / scale, row.total_ms / scale
            row.device_ms = (row.device_ms or 0.0) / scale if window.work else None
        return [self[name] for name in sorted(order, key=lambda name: (name == OTHER, key(name)))]


def parts(nesting: Nesting, window: TracedSteps) -> list[TracedPart]:
    """Time of every part on the host, with and without inner parts, and on the device; `other` is outside of all."""
    rows = _Rows()
    other = rows[OTHER]
    other.host_ms = other.total_ms = window.host_us
    for index, outer, length in _regions(nesting, window):
        row, around = (rows[OTHER if one == NONE else nesting.part[one] or OTHER] for one in (index, outer))
        row.calls += 1
        row.host_ms += length
        around.host_ms -= length
        other.total_ms -= length if outer == NONE else 0.0
        row.total_ms += length if around is not row else 0.0
    for work in window.work:
        row = rows[nesting.part_of(nesting.origin(work)) or OTHER]
        row.device_ms = (row.device_ms or 0.0) + work.end - work.start
        row.kernels += work.kind == "kernel"
    return rows.per_step(window)


def _regions(nesting: Nesting, window: TracedSteps) -> Iterable[tuple[int, int, float]]:
    """(region, the region around it or NONE, length) of the step's thread, inside steps."""
    inside: set[int] = set()
    for index, event in enumerate(nesting.events):
        if nesting.region[index] == index and event.thread == nesting.thread and window.holds(event.start):
            above = nesting.parent[index]
            outer = nesting.region[above] if above != NONE else NONE
            inside.add(index)
            yield index, outer if outer in inside else NONE, event.end - event.start


def timings(nesting: Nesting, window: TracedSteps) -> dict[str, dict[str, list[float]]]:
    """Milliseconds in every single step: operators without inner operators, kernels, regions."""
    tables: dict[str, defaultdict[str, list[float]]] = {
        kind: defaultdict(lambda: [0.0] * window.count) for kind in ("operators", "kernels", "regions")
    }

    def add(kind: str, name: str, step: int, time: float) -> None:
        if step != NONE:
            tables[kind][name][step] += time / 1e3

    for index, event in enumerate(nesting.events):
        if event.kind == "op" and window.holds(event.start):
            add("operators", event.name, window.step(event.start), event.end - event.start)
            above = nesting.above(nesting.parent[index], "op")
            around = nesting.events[above] if above != NONE else None
            if around and window.holds(around.start):
                add("operators", around.name, window.step(around.start), event.start - event.end)
    for work in window.work:
        add("kernels", work.name, window.step_of(work), work.end - work.start)
    for index, outer, length in _regions(nesting, window):
        name = nesting.part[index] or OTHER
        if outer == NONE or nesting.part[outer] != name:
            add("regions", name, window.step(nesting.events[index].start), length)
    return {kind: dict(table) for kind, table in tables.items()}


class TraceStacks:
    """The stacks of a trace at any time of any thread."""

    def __init__(self, trace: Trace, nesting: Nesting, window: TracedSteps) -> None:
        threads = grouped(trace.python, lambda event: event.thread)
        self._thread = nesting.thread
        self._threads = {thread: Innermost(events, nesting.rounding) for thread, events in threads.items()}
        self._frames: dict[str, Frame | None] = {}
        self._stacks = {thread: self._all(events) for thread, events in self._threads.items()}
        self._around = surrounding(summed((stack, us) for _, stack, _, us in self.times(window.steps)))

    def _all(self, events: Innermost) -> list[tuple[Stack, bool]]:
        """The stack of every event, and whether only a backward pass is inside of it."""
        stacks: list[tuple[Stack, bool]] = []
        known: dict[tuple[int, str], Stack] = {}
        for event, parent in zip(events.events, events.parent):
            outer, backward = stacks[parent] if parent != NONE else ((), False)
            if event.name not in self._frames:
                self._frames[event.name] = frame_of(event.name)
            frame = self._frames[event.name]
            inside = backward or event.name.endswith(_RUNS_BACKWARD)
            if frame is None:
                stacks.append((outer, inside))
            else:
                # Equal stacks are one object: a long trace has few of them.
                stacks.append((known.setdefault((id(outer), event.name), (*outer, frame)), False))
        return stacks

    def at(self, thread: str, time: float) -> tuple[Place | None, bool]:
        """The place of a thread at a time, and whether only autograd's backward pass is inside it."""
        events = self._threads.get(thread)
        index = events.index(time) if events else NONE
        if index == NONE:
            # Autograd runs the backward pass of a device in a thread of its own.
            return None, thread != self._thread
        stack, backward = self._stacks[thread][index]
        return self.place(stack), backward

    def place(self, stack: Stack) -> Place | None:
        return place_in(stack, self._around)

    def times(self, stretches: list[tuple[float, float]]) -> Iterator[tuple[Host, Stack, float, float]]:
        """The time of the steps' thread in some disjoint stretches: the innermost event, its stack, a moment and us."""
        if self._thread not in self._threads:
            return
        events, stacks, cover = self._threads[self._thread].events, self._stacks[self._thread], Cover(stretches)
        opened: list[int] = []
        cursor = 0.0

        def until(time: float) -> Iterator[tuple[Host, Stack, float, float]]:
            nonlocal cursor
            us = cover.of(cursor, time)
            if us > 0 and opened:
                yield events[opened[-1]], stacks[opened[-1]][0], time, us
            cursor = max(cursor, time)

        for index, event in enumerate([*events, None]):
            while opened and (event is None or events[opened[-1]].end <= event.start):
                yield from until(events[opened[-1]].end)
                opened.pop()
            if event is not None:
                yield from until(event.start)
                opened.append(index)


def frame_of(name: str) -> Frame | None:
    """The frame of a user or a library; None for those of torch, Python itself and functions in C."""
    match = _FRAME.fullmatch(name)
    if match is None:
        return None
    file = match["file"]
    installed = _INSTALLED.match(file)
    short = file[installed.end() :] if installed else file
    package = short.partition("/")[0]
    if package.removesuffix(".py") in {"torch", "triton", "recperf", *sys.stdlib_module_names} or "/torch/" in file:
        return None
    kind = LIBRARY if installed or LIBRARIES.fullmatch(package.removesuffix(".py")) else USER
    return Frame(kind, package, Place(match["function"], short, int(match["line"])))
