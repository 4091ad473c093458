"""The names that traced steps have in a trace: spans and modules as ranges, and their recording by torch.profiler."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from ..folders import temporary_folder
from ..ops.operators import fast_range
from .clocks import Moment, ThreadClock
from .spans import is_wait
from .step_parts import MODULE
from .trace.read import Trace, find_steps, read
from .trace.record import PART, STEP, filtered_stderr


class Recording:
    """Steps recorded by torch.profiler: the operators of every thread, with their sizes."""

    def __init__(self, *, cuda: bool) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        # With acc_events it would not warn, but build an object for every event when it stops.
        self._profiler: Any = torch_profile(
            activities=activities, record_shapes=True, experimental_config=_all_threads()
        )
        self._content = b""
        self.on_device = False
        """Whether kernels ran on a GPU."""
        # Torch prints lines and warnings when it starts.
        with filtered_stderr(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.start()

    def durations_us(self) -> list[float]:
        """End recording: the length of every event, without a trace."""
        self._end()
        return [event.duration_ns() / 1e3 for event in self._profiler.profiler.kineto_results.events()]

    def _end(self) -> None:
        with filtered_stderr():
            self._profiler.stop()

    def stop(self) -> None:
        """End recording. The trace is kept compressed: reading it would make the loop wait."""
        self._end()
        with temporary_folder() as folder:
            path = folder / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            content = path.read_bytes()
        self.on_device = b'"cat": "kernel"' in content
        self._content = zlib.compress(content, level=1)
        self._profiler = None

    def trace(self, last: int | None = None) -> Trace:
        """What was recorded; with `last`, of the named steps only so many."""
        with temporary_folder() as folder:
            path = folder / "trace.json"
            path.write_bytes(zlib.decompress(self._content))
            trace = read(path)
        if last:
            unused = {id(step) for step in find_steps(trace.host, STEP)[:-last]}
            trace.host = [event for event in trace.host if id(event) not in unused]
        return trace


def _all_threads() -> Any:
    """Lets torch.profiler record the operators of every thread, where this version of torch can."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


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
