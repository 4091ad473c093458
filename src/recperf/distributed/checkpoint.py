"""Checkpoints of several ranks: each writes and reads its own shards, in one folder that all of them can access.

Rank 0 does what a single process does. Where all ranks have to work it sends them a command: write your shards,
verify your share of the files, read your shards. The others execute commands until rank 0 is done. Training waits
meanwhile.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..errors import MachineError, RecperfError
from ..files import read_regular, writing
from ..machine import out_of_memory
from ..train import checkpoint_folder as folders
from ..train.checkpoint import CheckpointStore, read_state
from ..train.checkpoint_state import Content, Written
from ..train.loop import State
from .ranks import Ranks


@dataclass(kw_only=True)
class RankStore(CheckpointStore):
    """The checkpoints of one training, as one of its ranks uses them."""

    world: Ranks = field(default_factory=Ranks)
    _content: Content | None = None
    _into: State | None = None
    _state: State | None = None
    """What this rank has read."""

    def __post_init__(self) -> None:
        # A path in a command of rank 0 must mean the same folder to all.
        self.folder = self.folder.absolute()

    def save(self, step: int, state: State, *, best: bool) -> None:
        """Save a state; it is on disk when this returns."""
        self._content = content = Content.of(state)
        self._lead(lambda: self._write(step, content, best))
        self._content = None

    def load(self, which: str = "last", into: State | None = None) -> State | None:
        """Read a state as a single process does; each rank reads the shards that its own `into` has."""
        self._into, self._state = into, None
        self._lead(lambda: self._load_first(which, into))
        state, self._into, self._state = self._state, None, None
        return state

    def _load_first(self, which: str, into: State | None) -> None:
        probe = _nearest(self.folder) / f".seen.{os.getpid()}.tmp"
        with writing(probe):
            probe.write_bytes(b"")
        try:
            self._all("access", probe)
        finally:
            probe.unlink(missing_ok=True)
        super().load(which, into)

    def _lead(self, work: Callable[[], None]) -> None:
        """Rank 0 works, and the others execute its commands."""
        if not self.world.is_leader:
            self._follow()
            return
        try:
            with self._os_errors("save"):
                work()
        except RecperfError as error:
            self.world.shared_error = error
            self.world.broadcast(("failed", error))
            raise
        self.world.broadcast(("done", None))

    def _follow(self) -> None:
        while True:
            command, argument = self.world.broadcast(cast(tuple[str, Any], ("", None)))
            if command == "done":
                return
            if command == "failed":
                self.world.shared_error = argument
                raise argument
            self.world.gather(self._execute(command, argument))

    def _all(self, command: str, argument: Any = None) -> list[Any]:
        """The answers of all ranks to a command; raises the first error of any."""
        self.world.broadcast((command, argument))
        answers = self.world.gather(self._execute(command, argument))
        for rank, answer in enumerate(answers):
            if isinstance(answer, RecperfError):
                answer.where = {**answer.where, "rank": str(rank)}
                raise answer
        return answers

    def _execute(self, command: str, argument: Any) -> Any:
        try:
            with self._os_errors(command):
                return getattr(self, f"_do_{command}")(argument)
        except RecperfError as error:
            return error

    @contextmanager
    def _os_errors(self, command: str) -> Iterator[None]:
        """Turn an error of the operating system into one that can be sent to all ranks."""
        try:
            yield
        except OSError as error:
            if out_of_memory(error):
                raise
            raise MachineError(
                f"rank {self.world.rank} cannot {command} a checkpoint: {error.strerror or error}",
                where={"folder": self.folder, "rank": self.world.rank},
                fix="check the disk of that rank's host",
            ) from error

    def _do_access(self, probe: Path) -> None:
        if not probe.exists():
            raise self._not_shared(probe.parent)

    def _do_write(self, draft: Path) -> Written:
        if not draft.is_dir():
            raise self._not_shared(draft.parent)
        assert self._content is not None
        with writing(self.folder / draft.name):
            return self._content.write(draft, rank=self.world.rank)

    def _do_verify(self, argument: tuple[Path, bool, str]) -> str | None:
        path, from_disk, digest = argument
        if not self.world.is_leader and _manifest_digest(path) != digest:
            raise self._not_shared(path)
        if from_disk:
            folders.drop_from_cache(path)
        return folders.fault(path, share=(self.world.rank, self.world.size))

    def _do_read(self, path: Path) -> str | None:
        try:
            self._state = read_state(path, self._into)
            self.accept(folders.step_of(path), self._state)
        except folders.Damaged as damage:
            return str(damage)
        return None

    def _write_tensors(self, draft: Path, content: Content) -> list[Written]:
        return self._all("write", draft)

    def _fault(self, path: Path, *, from_disk: bool = False) -> str | None:
        # Sizes first: the other ranks need not read what is no checkpoint at all.
        fault = folders.fault(path, hashed=False)
        if fault is not None:
            return fault
        answers = self._all("verify", (path, from_disk, _manifest_digest(path)))
        return next((answer for answer in answers if answer), None)

    def _read(self, path: Path, into: State | None) -> State:
        damage = next((answer for answer in self._all("read", path) if answer), None)
        if damage is not None:
            raise folders.Damaged(damage)
        assert self._state is not None
        return self._state

    def _not_shared(self, folder: Path) -> MachineError:
        return MachineError(
            f"rank {self.world.rank} does not see the files that rank 0 writes",
            where={"folder": folder},
            fix="--run-dir on a file system that all hosts share",
        )


def _nearest(path: Path) -> Path:
    """The folder, or the nearest existing one above it."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _manifest_digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_regular(path / folders.MANIFEST)).hexdigest()
    except OSError:
        return ""
