"""Parts of a step: the clocks of its thread, spans and modules as named ranges, and the part of each traced event."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

import torch
from torch import nn

from ..ops.operators import fast_range
from .spans import is_wait
from .trace.nesting import NONE, Nesting
from .trace.read import PART, STEP, STEP_OF_TORCH

MODULE = "recperf.module."
"""Begins the ranges of modules."""
LOADER = "enumerate(DataLoader)"
"""The region that torch records around the next batch."""


class Moment(NamedTuple):
    wall: int
    cpu: int
    waiting: int
    """Time since the thread began in which it could have run but other work had its core."""

    def since(self, before: Moment) -> Moment:
        return Moment(self.wall - before.wall, self.cpu - before.cpu, self.waiting - before.waiting)

    def plus(self, other: Moment) -> Moment:
        return Moment(self.wall + other.wall, self.cpu + other.cpu, self.waiting + other.waiting)

    @property
    def off(self) -> int:
        """Time in which the thread waited for something other than a core: a sleep, a lock, a disk."""
        return max(0, self.wall - self.cpu - self.waiting)


class ThreadClock:
    """Reads the clocks of the thread that created it, in a few microseconds."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def now(self) -> Moment:
        waiting = 0
        if self._file is not None:
            try:
                waiting = int(os.pread(self._file, 96, 0).split()[1])
            except (OSError, IndexError, ValueError):
                waiting = 0
        return Moment(perf_counter_ns(), thread_time_ns(), waiting)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class SpanRanges:
    """Hears the spans of recperf's own steps."""

    def __init__(self, observer: Any) -> None:
        # An Observer, whose module imports this one.
        self._observer = observer
        self._open: list[tuple[str, Any, Moment | None]] = []
        self._waiting = False

    @property
    def inside(self) -> str:
        """The innermost open span, which names the exchanges inside it."""
        return self._open[-1][0] if self._open else ""

    def enter(self, name: str) -> None:
        scope = since = None
        if self._observer.state == "traced":
            scope = fast_range(PART + name)
            scope.__enter__()
        if not self._waiting and is_wait(name):
            self._waiting, since = True, self._observer.clock.now()
        self._open.append((name, scope, since))

    def leave(self) -> None:
        name, scope, since = self._open.pop()
        if since is not None:
            self._waiting = False
            (self._observer.waited_for_input if name == "data" else self._observer.waited_for_ranks)(since)
        if scope is not None:
            scope.__exit__(None, None, None)


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Record the forward pass of every module of the model as a named range."""
    open_ranges: list[Any] = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            scope = fast_range(MODULE + name)
            scope.__enter__()
            open_ranges.append(scope)

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        if name and not isinstance(module, (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule)):
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Parts:
    """The part of the program that every event belongs to: a span, a named region or a module.

    A node of the backward pass belongs to the part whose forward pass created it.
    """

    def __init__(self, nesting: Nesting) -> None:
        self.nesting = nesting
        self._names = [self._range(index) for index in range(len(nesting.events))]
        self._forward: dict[int, str] = {}
        for index, event in enumerate(nesting.events):
            if event.kind == "op" and event.sequence is not None and not _is_node(event.name):
                name = self._names[index]
                if name not in (None, "data") and not name.startswith(LOADER) and self._node(index) == NONE:
                    self._forward[event.sequence] = name

    def of(self, index: int) -> str | None:
        node = self._node(index)
        if node != NONE:
            sequence = self.nesting.events[node].sequence
            forward = self._forward.get(sequence) if sequence is not None else None
            if forward is not None:
                return f"{forward}, backward"
        return self._names[index]

    def _node(self, index: int) -> int:
        while index != NONE and not _is_node(self.nesting.events[index].name):
            index = self.nesting.parent[index]
        return index

    def _range(self, index: int) -> str | None:
        while index != NONE:
            event = self.nesting.events[index]
            if event.kind == "range" and not event.name.startswith((STEP, STEP_OF_TORCH)):
                return region_name(event.name)
            index = self.nesting.parent[index]
        return None


def _is_node(name: str) -> bool:
    return name.startswith("autograd::engine::evaluate_function")


def region_name(name: str) -> str:
    """The name of a region as its author knows it."""
    for prefix in (PART, MODULE, "Optimizer.step#", "Optimizer.zero_grad#"):
        if name.startswith(prefix):
            short = name.removeprefix(prefix)
            return {"Optimizer.step#": f"optimizer {short}", "Optimizer.zero_grad#": f"optimizer {short}"}.get(
                prefix, short
            )
    return name


def part_rows(operators: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Time of each part, largest first."""
    parts: defaultdict[str, float] = defaultdict(float)
    for row in operators:
        parts[row["part"] or "(no part)"] += row["ms"]
    whole = sum(parts.values()) or 1.0
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return [{"name": name, "ms": ms, "share_of_operators": ms / whole} for name, ms in ordered]
