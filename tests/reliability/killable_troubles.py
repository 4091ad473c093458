"""What is made to happen in a child process: a kill at a named moment, a disk that refuses, a loss that is no number.

Each function arms one thing and returns; a child calls them before the command.
"""

from __future__ import annotations

import gc
import io
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recperf import points


def _at(point: str, nth: int, act: Callable[[], None]) -> None:
    """Act when a moment passes for the n-th time, beside whoever listens already."""
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
    """End without warning, and leave a mark that says where."""

    def die() -> None:
        Path(mark).write_text(point)
        os.kill(os.getpid(), signal.SIGKILL)

    _at(point, nth, die)


def signal_at(point: str, nth: int, number: int) -> None:
    _at(point, nth, lambda: os.kill(os.getpid(), number))


def pause_at(point: str, nth: int, mark: str) -> None:
    """Stand still there until somebody ends it."""

    def stand() -> None:
        Path(mark).write_text(point)
        time.sleep(600)

    _at(point, nth, stand)


def kill_in(function: str, nth: int) -> None:
    """End without warning at the n-th call of a function of `os`, before it takes effect."""
    original: Any = getattr(os, function)
    seen = 0

    def dying(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(os, function, dying)


def refuse(functions: list[str], number: int, point: str, nth: int) -> None:
    """From a moment on the system refuses these calls of `os`, as a full or broken disk does."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    def arm() -> None:
        for function in functions:
            setattr(os, function, fail)

    _at(point, nth, arm)


def unreadable(name: str, number: int, until: str) -> None:
    """Opening a file whose path ends like this fails, until a moment passes."""
    original = io.open
    _at(until, 1, lambda: setattr(io, "open", original))

    def opened(file: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and os.fspath(file).endswith(name):
            raise OSError(number, os.strerror(number))
        return original(file, *arguments, **named)

    io.open = opened  # type: ignore[assignment]


def at_most(file_bytes: int) -> None:
    """No file of this process may grow beyond that: the kernel itself refuses."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


def poison(step: int) -> None:
    """A weight is no number from a step on."""
    from recperf.models.dlrm_v4.model import DLRMv4
    from recperf.workloads.dlrm_v4.build import SteppedModel

    original = SteppedModel.loss

    def loss(self: SteppedModel, batch: Any) -> Any:
        if batch.step + 1 == step:
            model: DLRMv4 = self.model
            with torch.no_grad():
                next(iter(model.dense_parameters())).fill_(float("nan"))
        return original(self, batch)

    SteppedModel.loss = loss  # type: ignore[method-assign]


def write_memory(path: str, every: int) -> None:
    """Note the resident memory after every so many steps, garbage taken away."""
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
