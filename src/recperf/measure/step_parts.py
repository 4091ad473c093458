"""What an observer reads of a step: the clocks of its thread, and its spans and modules as named ranges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any, NamedTuple

import torch
from torch import nn

from ..ops.operators import fast_range
from .spans import is_wait
from .trace.read import PART

MODULE = "recperf.module."
"""Begins the ranges of modules."""
MOST_PLAIN = 200
"""Steps that are timed at most."""
TRACED = 4


@dataclass(frozen=True)
class Counts:
    """How many steps to observe, where ranks must take the same number or time is short."""

    warm: int
    plain: int
    traced: int
    counted: int

    @classmethod
    def within(cls, step_ms: float, seconds: float) -> Counts:
        """So many that small steps take about this time together; long steps are observed the fewest times."""
        fitting = max(1, int(seconds * 1e3 / max(step_ms, 1e-3)))
        return cls(1, max(2, min(MOST_PLAIN, fitting // 2)), max(1, min(TRACED, fitting // 3)), 2 + (fitting >= 16))


class Moment(NamedTuple):
    wall: int
    cpu: int
    waiting: int
    """Time since the thread began in which it could have run but other work had its core."""
    process: int
    """CPU time of all threads of the process."""

    def since(self, before: Moment) -> Moment:
        return Moment(*(now - then for now, then in zip(self, before, strict=True)))

    def plus(self, other: Moment) -> Moment:
        return Moment(*(one + more for one, more in zip(self, other, strict=True)))

    @property
    def off(self) -> int:
        """Time in which the thread waited for something other than a core: a sleep, a lock, a disk."""
        return max(0, self.wall - self.cpu - self.waiting)


class TimedStep(NamedTuple):
    whole: Moment
    input: Moment
    """Its wait for input."""
    ranks: Moment
    """Its waits for other ranks."""


class ThreadClock:
    """Reads the clocks of the thread that created it, in a few microseconds."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None
        self.tells_waiting = self._file is not None
        """Whether the system tells how long the thread waited for a core."""

    def now(self) -> Moment:
        waiting = 0
        if self._file is not None:
            try:
                waiting = int(os.pread(self._file, 96, 0).split()[1])
            except (OSError, IndexError, ValueError):
                waiting = 0
        return Moment(perf_counter_ns(), thread_time_ns(), waiting, process_time_ns())

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
            self._observer.waiting = "input" if name == "data" else "ranks"
        self._open.append((name, scope, since))

    def leave(self) -> None:
        name, scope, since = self._open.pop()
        if since is not None:
            self._waiting, self._observer.waiting = False, ""
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


def cuda_used() -> bool:
    """Whether this process has used a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
