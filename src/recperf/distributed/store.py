"""Checkpoints of several ranks: each writes and reads its own parts of the tables, in one folder that all of them see.

Rank 0 does what one process does. Where all have to work, it tells them what: to write their parts, to look at their
share of the files, to read. The others do what they are told until it is done. Training waits meanwhile.
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
from ..files import writing
from ..machine import out_of_memory
from ..train import checkpoint_folder as folders
from ..train.checkpoint import CheckpointStore, read_state
from ..train.checkpoint_tree import Content
from .notes import note
from .world import World

_DOES = {"see": "look at", "look": "look at", "write": "write", "read": "read"}


@dataclass(kw_only=True)
class RankStore(CheckpointStore):
    """The checkpoints of one training, as one of its ranks sees them."""

    world: World = field(default_factory=World)
    _content: Content | None = None
    _into: dict[str, Any] | None = None
    _found: dict[str, Any] | None = None
    """What this rank has read."""

    def __post_init__(self) -> None:
        # What rank 0 names must be the same place for all.
        self.folder = self.folder.absolute()

    def save(self, step: int, state: dict[str, Any], *, best: bool) -> None:
        """Keep a state; it is on disk when this returns."""
        note(f"saving step {step}")
        self._content = content = Content.of(state)
        self._led(lambda: self._write(step, content, best))
        self._content = None

    def load(self, which: str = "last", into: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """As one process does; of what `into` holds in parts, each rank reads its own."""
        note("loading a checkpoint")
        self._into, self._found = into, None
        self._led(lambda: self._load_first(which, into))
        found, self._into, self._found = self._found, None, None
        return found

    def _load_first(self, which: str, into: dict[str, Any] | None) -> None:
        place = _nearest(self.folder)
        token = place / f".seen.{os.getpid()}.tmp"
        with writing(token):
            token.write_bytes(b"")
        try:
            self._all("see", token)
        finally:
            token.unlink(missing_ok=True)
        super().load(which, into)

    def _led(self, work: Callable[[], None]) -> None:
        """Rank 0 works, and the others do what it tells them."""
        if not self.world.is_leader:
            self._follow()
            return
        try:
            with self._said(""):
                work()
        except RecperfError as error:
            self.world.shared_error = error
            self.world.broadcast(("failed", error))
            raise
        self.world.broadcast(("done", None))

    def _follow(self) -> None:
        while True:
            order, word = self.world.broadcast(cast(tuple[str, Any], ("", None)))
            if order == "done":
                return
            if order == "failed":
                self.world.shared_error = word
                raise word
            self.world.gather(self._tried(order, word))

    def _all(self, order: str, word: Any = None) -> list[Any]:
        """What every rank answers to an order; the first error of a rank is everyone's."""
        self.world.broadcast((order, word))
        answers = self.world.gather(self._tried(order, word))
        for rank, answer in enumerate(answers):
            if isinstance(answer, RecperfError):
                answer.where = {**answer.where, "rank": str(rank)}
                raise answer
        return answers

    def _tried(self, order: str, word: Any) -> Any:
        try:
            with self._said(order):
                return getattr(self, f"_do_{order}")(word)
        except RecperfError as error:
            return error

    @contextmanager
    def _said(self, order: str) -> Iterator[None]:
        """What the system refuses a rank, as an error that all ranks can be told."""
        try:
            yield
        except OSError as error:
            if out_of_memory(error):
                raise
            raise MachineError(
                f"rank {self.world.rank} cannot {_DOES.get(order, 'keep')} a checkpoint: {error.strerror or error}",
                where={"folder": self.folder, "rank": self.world.rank},
                fix="check the disk of that rank's host",
            ) from error

    def _do_see(self, token: Path) -> None:
        if not token.exists():
            raise _not_seen(self.world, token.parent)

    def _do_write(self, draft: Path) -> Any:
        from ..train.checkpoint_dcp import write_blocks

        if not draft.is_dir():
            raise _not_seen(self.world, draft.parent)
        assert self._content is not None
        blocks = {**self._content.blocks, **self._content.parts} if self.world.is_leader else self._content.parts
        with writing(self.folder / draft.name):
            return write_blocks(draft, blocks, f"{self.world.rank}-")

    def _do_look(self, word: tuple[Path, bool, str]) -> str | None:
        path, from_disk, digest = word
        if not self.world.is_leader and _manifest_digest(path) != digest:
            raise _not_seen(self.world, path)
        if from_disk:
            folders.drop_from_cache(path)
        return folders.fault(path, share=(self.world.rank, self.world.size))

    def _do_read(self, path: Path) -> str | None:
        try:
            self._found = read_state(path, self._into)
        except folders.Damaged as damage:
            return str(damage)
        return None

    def _write_tensors(self, draft: Path, content: Content) -> dict[str, dict[str, Any]]:
        from ..train.checkpoint_dcp import write_metadata

        return write_metadata(draft, self._all("write", draft))

    def _fault(self, path: Path, *, from_disk: bool = False) -> str | None:
        # What is no checkpoint at all the others need not see.
        found = folders.fault(path, hashed=False)
        if found is not None:
            return found
        answers = self._all("look", (path, from_disk, _manifest_digest(path)))
        return next((answer for answer in answers if answer), None)

    def _read(self, path: Path, into: dict[str, Any] | None) -> dict[str, Any]:
        damage = next((answer for answer in self._all("read", path) if answer), None)
        if damage is not None:
            raise folders.Damaged(damage)
        assert self._found is not None
        return self._found


def _nearest(path: Path) -> Path:
    """The folder, or the nearest one above that is there."""
    return next(place for place in (path, *path.parents) if place.is_dir())


def _manifest_digest(path: Path) -> str:
    try:
        return hashlib.sha256((path / folders.MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""


def _not_seen(world: World, folder: Path) -> MachineError:
    return MachineError(
        f"rank {world.rank} does not see the files that rank 0 writes",
        where={"folder": folder},
        fix="--run-dir on a file system that all hosts share",
    )
