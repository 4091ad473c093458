"""A run's folder as several ranks share it: rank 0 has it, the others know what it knows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError, DataError, RecperfError
from ..runs.record import Run
from ..runs.resume import changes, fields_of
from ..train.checkpoint import CheckpointStore
from ..train.stop import StopFlag
from .checkpoint import RankStore
from .world import World

OF_A_HOST = ("data.path", "data.cache")
"""Fields that may differ between hosts: the data's digest is compared."""


def require_same_config(world: World, workload: str, config: Any, **options: Any) -> None:
    """Refuse ranks that were started with something else than rank 0: they would wait for each other, or learn what
    nobody asked for."""
    if world.size == 1:
        return
    ours = {"workload": workload, **fields_of(config), **options}
    for name in OF_A_HOST:
        ours.pop(name, None)
    first = world.broadcast(ours)
    lacking = sorted(ours.keys() ^ first.keys())
    differing = [(change.field, change.was, change.now) for change in changes(first, ours)]
    differing += [(name, first.get(name, "nothing"), ours.get(name, "nothing")) for name in lacking]
    for rank, found in enumerate(world.broadcast(world.gather(differing[:1]))):
        for field, was, now in found:
            raise ConfigError(
                f"rank {rank} has {field} {now!r}, rank 0 has {was!r}",
                where={"rank": rank, "field": field},
                fix="the same command, and the same config where it is read from a file, on every host",
            )


def require_same_data(world: World, digest: str) -> None:
    """Refuse ranks that read other data than rank 0."""
    digests = world.broadcast(world.gather(digest))
    for rank, found in enumerate(digests):
        if found != digests[0]:
            world.shared_error = error = DataError(
                f"rank {rank} has other data than rank 0",
                where={"rank": rank, "its digest": found, "digest of rank 0": digests[0]},
                fix="the same data on every host",
            )
            raise error


class _Led:
    """Rank 0's run: what is read of it is read by all."""

    def __init__(self, run: Run, world: World) -> None:
        self._run, self._world = run, world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def read(self, name: str, *needs: str) -> Any:
        return self._world.broadcast(self._run.read(name, *needs))

    def digest(self, name: str) -> Any:
        return self._world.broadcast(self._run.digest(name))


class _Followed:
    """The run of the other ranks: nothing is written, and reading is being told."""

    event_bytes = 0

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self._world = folder, world

    def read(self, name: str, *needs: str) -> Any:
        return self._world.broadcast(None)

    def digest(self, name: str) -> Any:
        return self._world.broadcast(None)

    def event_digest(self, size: int | None = None) -> str:
        return ""

    def event(self, kind: str, **fields: Any) -> None:
        pass

    def write(self, name: str, value: Any) -> None:
        pass

    def sync_events(self) -> None:
        pass

    def rewind_events(self, size: int, digest: str | None = None) -> None:
        pass

    def forget_events(self, seed: int) -> None:
        pass


def shared(run: Run | None, world: World) -> Run:
    """The run as this rank sees it; rank 0 brings it."""
    folder = world.broadcast(run.folder if run else Path())
    return cast(Run, _Followed(folder, world) if run is None else _Led(run, world))


def shared_store(store: CheckpointStore, world: World) -> CheckpointStore:
    """The checkpoints as this rank sees them."""
    if world.size == 1:
        return store
    return RankStore(folder=store.folder, notice=store.notice, keep_last=store.keep_last, world=world)


class _SharedStop:
    """Stops where all ranks agreed to, which they do once a step; a signal may reach them steps apart."""

    def __init__(self, own: StopFlag, world: World) -> None:
        self._own, self._world = own, world
        world.stop_flag = own

    @property
    def received(self) -> int | None:
        return self._world.signal

    def patience(self) -> AbstractContextManager[None]:
        return self._own.patience()

    def error(self, what: str, fix: str | None) -> RecperfError:
        return StopFlag.error(cast(StopFlag, self), what, fix)


def shared_stop(own: StopFlag, world: World) -> StopFlag:
    return own if world.size == 1 else cast(StopFlag, _SharedStop(own, world))
