"""What the ranks of a run share: its folder, which rank 0 writes, a stop flag, and a measured window."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError, RecperfError
from ..runs.record import Run
from ..runs.resume import changes, fields_of
from ..stop import StopFlag
from .ranks import Ranks

HOST_FIELDS = ("data.path",)
"""Fields that may differ between hosts: the digest of the data is compared instead."""
WRITES = {
    "event", "write", "sync_events", "rewind_events", "forget_events", "log_fault", "note_progress", "note_waited",
    "remove"
}  # fmt: skip
"""Methods of a run that only rank 0 carries out."""


def require_same_config(world: Ranks, workload: str, config: Any, **options: Any) -> None:
    """Fail on every rank if one was started with another command than rank 0: ranks would wait for each other forever,
    or train another model than requested."""
    own = {"workload": workload, **fields_of(config), **options}
    for name in HOST_FIELDS:
        own.pop(name, None)
    leader = world.broadcast(own)
    differences = [(change.field, change.was, change.now) for change in changes(leader, own)]
    for name in sorted(own.keys() ^ leader.keys()):
        differences.append((name, leader.get(name, "nothing"), own.get(name, "nothing")))
    for rank, first in enumerate(world.all_gather(differences[:1])):
        for field, was, now in first:
            raise ConfigError(
                f"rank {rank} has {field} {now!r}, rank 0 has {was!r}",
                where={"rank": rank, "field": field},
                fix="start every host with the same command and the same config file",
            )


class _SharedRun:
    """The run of several ranks: rank 0 writes it, and what rank 0 reads is sent to the others."""

    def __init__(self, run: Run | None, world: Ranks) -> None:
        """`run` is None on all ranks but 0, where writing does nothing."""
        self._run, self._world = run, world
        self.folder = world.broadcast(run.folder if run else Path())

    def __getattr__(self, name: str) -> Any:
        return _nothing if self._run is None and name in WRITES else getattr(self._run, name)

    @property
    def event_bytes(self) -> int:
        return self._run.event_bytes if self._run else 0

    def event_digest(self, size: int | None = None) -> str:
        return self._run.event_digest(size) if self._run else ""

    def read(self, name: str, kind: Any = dict, *, reader: Callable[[Path], Any] | None = None) -> Any:
        return self._world.broadcast(self._run.read(name, kind, reader=reader) if self._run else None)

    def digest(self, name: str) -> Any:
        return self._world.broadcast(self._run.digest(name) if self._run else None)


def _nothing(*arguments: Any, **named: Any) -> None:
    """What the other ranks do instead."""


def share_run(run: Run | None, world: Ranks) -> Run:
    """The run as this rank sees it: rank 0 passes it and writes it, the others pass None."""
    return cast(Run, run if world.size == 1 else _SharedRun(run, world))


def share_stop(stop: StopFlag, world: Ranks) -> StopFlag:
    """A stop flag that is set on all ranks in the same step."""
    return stop if world.size == 1 else cast(StopFlag, SharedStop(stop, world))


class SharedStop:
    """Stops all ranks in the same step, on which they agree once a step: a signal may reach them steps apart."""

    def __init__(self, own: StopFlag, world: Ranks) -> None:
        self._own, self._world = own, world
        world.stop_flag = own

    @property
    def received(self) -> int | None:
        return self._world.signal

    def deferred(self) -> AbstractContextManager[None]:
        return self._own.deferred()

    def explain(self, what: str) -> None:
        self._own.explain(what)

    def interruptible(self) -> AbstractContextManager[None]:
        """Ranks agree on signals in steps only, so they finish together what they do between steps."""
        return nullcontext()

    def error(self, what: str, fix: str | None) -> RecperfError:
        return StopFlag.error(cast(StopFlag, self), what, fix)


class SingleWindow:
    """The window of a single process: there is nobody to wait for."""

    watch = step = nullcontext

    def meet(self) -> None:
        pass

    def join(self, profile: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return profile


def window_of(world: Ranks) -> Any:
    """What measuring a window of steps needs beside the steps themselves."""
    if world.size == 1:
        return SingleWindow()
    from .waits import SharedWindow

    return SharedWindow(world)
