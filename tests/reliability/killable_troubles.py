"""Faults to inject into a child process: a kill at a named moment, a failing disk, a NaN loss.

Each function arms one fault and returns; a child calls them before the command.
"""

from __future__ import annotations

import functools
import gc
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recperf import stop as points


def _at(point: str, nth: int, act: Callable[[], None]) -> None:
    """Act when a moment is reached for the n-th time, in addition to earlier listeners."""
    before, seen = points.listener, 0

    def listen(name: str) -> None:
        nonlocal seen
        if before:
            before(name)
        if name == point:
            seen += 1
            if seen == nth:
                act()

    points.listener = listen


def kill_at(point: str, nth: int, mark: str) -> None:
    """Kill the process, after writing a file that says where."""

    def die() -> None:
        Path(mark).write_text(point)
        os.kill(os.getpid(), signal.SIGKILL)

    _at(point, nth, die)


def signal_at(point: str, nth: int, number: int) -> None:
    _at(point, nth, lambda: os.kill(os.getpid(), number))


def pause_at(point: str, nth: int, mark: str) -> None:
    """Sleep there until the process is killed."""

    def pause() -> None:
        Path(mark).write_text(point)
        time.sleep(600)

    _at(point, nth, pause)


def kill_in(function: str, nth: int) -> None:
    """Kill the process at the n-th call of a function of `os`, before it takes effect."""
    signal_in(function, nth, signal.SIGKILL)


def signal_in(function: str, nth: int, number: int) -> None:
    """Receive a signal at the n-th call of a function of `os`, before it takes effect."""
    original: Any = getattr(os, function)
    seen = 0

    def signalled(*arguments: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), number)
        return original(*arguments, **options)

    setattr(os, function, signalled)


def meet_in(file: str) -> None:
    """Let ranks meet in a file."""
    from recperf.distributed.ranks import Ranks

    torch.set_num_threads(1)
    Ranks.join = functools.partialmethod(Ranks.join, init_method=f"file://{file}")  # type: ignore[method-assign]


def load_again() -> None:
    """Forget the compiled libraries that the fork server has loaded."""
    for name, module in list(sys.modules.items()):
        if name.startswith("recperf.ops.") and name.endswith(".native"):
            module.library.cache_clear()


def refuse(functions: list[str], number: int, point: str, nth: int) -> None:
    """From a moment on these calls of `os` fail, as with a full or broken disk."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    def arm() -> None:
        for function in functions:
            setattr(os, function, fail)

    _at(point, nth, arm)


def unreadable(name: str, number: int, until: str) -> None:
    """Opening a file whose path ends with `name` fails until a moment is reached."""
    for module in (io, os):
        _open_fails(module, name, number, until)


def _open_fails(module: Any, name: str, number: int, until: str) -> None:
    original = module.open
    _at(until, 1, lambda: setattr(module, "open", original))

    def opened(file: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and os.fspath(file).endswith(name):
            raise OSError(number, os.strerror(number))
        return original(file, *arguments, **options)

    module.open = opened


def at_most(file_bytes: int) -> None:
    """Limit the size of every file that the process writes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


def poison(step: int) -> None:
    """Set a weight to NaN at a step."""
    from recperf.models.dlrm_v4.model import DLRMv4
    from recperf.workloads.dlrm_v4.steps import SteppedModel

    original = SteppedModel.loss

    def loss(self: SteppedModel, batch: Any) -> Any:
        if batch.step + 1 == step:
            model: DLRMv4 = self.model
            with torch.no_grad():
                next(iter(model.dense_parameters())).fill_(float("nan"))
        return original(self, batch)

    SteppedModel.loss = loss  # type: ignore[method-assign]


def write_memory(path: str, every: int) -> None:
    """Write the resident memory to a file every `every` steps, after a garbage collection."""
    from recperf.train.watch import Watchers

    original = Watchers.after_step

    def after_step(self: Watchers, position: Any, *rest: Any) -> None:
        original(self, position, *rest)
        if position.step % every == 0:
            gc.collect()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            with Path(path).open("a") as file:
                file.write(f"{position.step} {resident}\n")

    Watchers.after_step = after_step  # type: ignore[method-assign]
