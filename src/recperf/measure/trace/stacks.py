"""Places in the user's program from the Python stacks of a trace (with_stack=True). Torch-free.

The profiler records the line at which a function begins, not the one that it executes.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator

from ..places import LIBRARY, USER, Frame, Stack, place_in, surrounding
from ..records import Place
from .nesting import NONE, Cover, Innermost, Nesting
from .read import Host, Trace
from .window import TracedSteps

LIBRARIES = re.compile(
    "accelerate|datasets|deepctr_torch|deepspeed|einops|fbgemm_gpu|ignite|joblib|keras|lightning|lightning_fabric|"
    "matplotlib|numpy|pandas|PIL|polars|pyarrow|pytorch_lightning|recbole|scipy|sklearn|tensorflow|timm|tokenizers|"
    "torch_geometric|torchmetrics|torchrec|torchvision|tqdm|transformers|typing_extensions|wandb|xformers"
)
"""Packages that programs use: a trace names files from the folder of their import, wherever that is."""
_FRAME = re.compile(r"(?P<file>[^<].*\.py|<ipython.*>)\((?P<line>\d+)\): (?P<function>.+)")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_RUNS_BACKWARD = "_engine_run_backward"


class TraceStacks:
    """The stacks of a trace at any time of any thread."""

    def __init__(self, trace: Trace, nesting: Nesting, window: TracedSteps) -> None:
        threads: defaultdict[str, list[Host]] = defaultdict(list)
        for event in trace.python:
            threads[event.thread].append(event)
        self._thread = nesting.thread
        self._threads = {thread: Innermost(events, nesting.rounding) for thread, events in threads.items()}
        self._frames: dict[str, Frame | None] = {}
        self._stacks = {thread: self._all(events) for thread, events in self._threads.items()}
        times: defaultdict[Stack, float] = defaultdict(float)
        for _, stack, us in self.times(window.steps):
            times[stack] += us
        self._around = surrounding(times)

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

    def times(self, stretches: list[tuple[float, float]]) -> Iterator[tuple[Host, Stack, float]]:
        """The time of the steps' thread in some disjoint stretches: the innermost event, its stack and us."""
        if self._thread not in self._threads:
            return
        events, stacks, cover = self._threads[self._thread].events, self._stacks[self._thread], Cover(stretches)
        opened: list[int] = []
        cursor = 0.0

        def until(time: float) -> Iterator[tuple[Host, Stack, float]]:
            nonlocal cursor
            us = cover.of(cursor, time)
            if us > 0 and opened:
                yield events[opened[-1]], stacks[opened[-1]][0], us
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
