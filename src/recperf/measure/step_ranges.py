"""Spans and modules as named ranges of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ..ops.operators import fast_range
from .clocks import Moment, ThreadClock
from .spans import is_wait
from .step_parts import MODULE
from .trace.read import PART


class Observing(Protocol):
    """What spans tell an observer of steps."""

    state: str
    clock: ThreadClock

    def waited_for_input(self, since: Moment) -> None: ...

    def waited_for_ranks(self, since: Moment) -> None: ...


class SpanRanges:
    """Hears the spans of recperf's own steps."""

    def __init__(self, observer: Observing) -> None:
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
