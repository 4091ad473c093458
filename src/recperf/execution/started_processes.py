"""The processes that a program has started and that would outlive it, or that Python would wait for at its exit: they
end where the program was stopped before it could end them."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children, util
from multiprocessing.queues import Queue
from pathlib import Path
from time import monotonic, sleep

from ..stop import FLAG

GRACE_S = 2.0
"""Time to end by SIGTERM."""
HELPERS = (b"multiprocessing.resource_tracker", b"compile_worker")
"""Processes of Python and torch that end with this one, and tidy up then."""
_PROC = Path("/proc")


class StartedProcesses:
    """Those that were started after this object was made, and theirs. Without /proc those of multiprocessing alone."""

    def __init__(self) -> None:
        self._before = set(_descendants())

    def end(self, patience: float = 0.0) -> None:
        """End them, first by SIGTERM, after so many seconds to end by themselves. Daemons of multiprocessing are left
        to their owner, who ends them at exit: the workers of a DataLoader raise an error in it where they end
        otherwise."""
        daemons = {child.pid for child in active_children() if child.daemon and child.pid is not None}
        until = monotonic() + patience
        while (running := self._now(daemons)) and monotonic() < until:
            sleep(0.02)
        if not running:
            return
        _send(signal.SIGTERM, running)
        until = monotonic() + GRACE_S
        while (running := self._now(daemons)) and monotonic() < until:
            sleep(0.02)
        _send(signal.SIGKILL, running)
        # At exit the thread of a queue would wait for processes that read no more; the queue itself may be gone.
        for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
            if finalizer._callback is Queue._finalize_join:  # type: ignore[attr-defined]
                finalizer.cancel()

    def kill(self) -> None:
        """End them at once, daemons too: this process ends as well."""
        with suppress(ValueError):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while running := self._now(set()):
            _send(signal.SIGKILL, running)
            sleep(0.005)

    @contextmanager
    def ended_with_command(self) -> Iterator[None]:
        """Inside, a signal that ends this process at once ends them too."""
        with FLAG.before_exit(self.kill):
            yield

    def _now(self, left: set[int]) -> set[int]:
        children = {child.pid for child in active_children() if child.pid is not None}
        return (set(_descendants(left)) | children) - self._before - left


def _descendants(left: Collection[int] = ()) -> Iterator[int]:
    """The numbers of the processes that this one has started and of those that they have; without zombies, those that
    are left, and theirs."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        with suppress(OSError, ValueError):
            number = int(folder.name)
            state, parent = (folder / "stat").read_text().rpartition(") ")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(number)
    found = [os.getpid()]
    for one in found:
        for child in children.get(one, ()):
            with suppress(OSError):
                if child not in left and not any(name in (_PROC / f"{child}/cmdline").read_bytes() for name in HELPERS):
                    found.append(child)
                    yield child


def _send(number: int, processes: set[int]) -> None:
    for one in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(one, number)
