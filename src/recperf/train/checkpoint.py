"""The checkpoints of one training: written whole or not at all, read back before older ones go, never half trusted."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from ..errors import DataError, MachineError
from ..files import sync_folder, writing
from ..machine import out_of_memory
from ..points import passing
from . import checkpoint_folder as folders
from .checkpoint_tree import Content, Rebuilt

STATE = "state.json"


@dataclass(kw_only=True)
class CheckpointStore:
    """Keeps the last checkpoints and the best. One process at a time: whoever holds the run."""

    folder: Path
    notice: Callable[[str], None]
    keep_last: int = 1
    background: bool = False
    """Copy the state to host memory and let a thread write it, one checkpoint at a time."""
    _passed_over: set[Path] = field(default_factory=set)
    """Newer than the one that was loaded, and damaged when it was."""
    _room: dict[str, Tensor] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _failure: BaseException | None = None

    def save(self, step: int, state: dict[str, Any], *, best: bool) -> None:
        """Keep a state. A step that has an intact checkpoint keeps it, as the best where it now is."""
        self.wait()
        content = Content.of(state, room=self._room if self.background else None)
        if not self.background:
            self._write(step, content, best)
            return
        # Not a daemon: a process that ends finishes its checkpoint first.
        self._thread = threading.Thread(target=self._try, args=(step, content, best), name="checkpoint", daemon=False)
        self._thread.start()

    def _try(self, step: int, content: Content, best: bool) -> None:
        try:
            self._write(step, content, best)
        except BaseException as failure:
            self._failure = failure

    def wait(self) -> None:
        """Until what is being written is on disk; raises what went wrong with it."""
        if self._thread:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        self.wait()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:
            # What ended the training is the news; this must not take its place.
            self.notice(f"the last checkpoint was not written: {failure}")

    def _write(self, step: int, content: Content, best: bool) -> None:
        final = self.folder / folders.name_of(step)
        with writing(final):
            self._make_folder()
            there = os.path.lexists(final) and final not in self._passed_over
            if not there or self._fault(final) is not None:
                self._write_new(final, step, content, best)
                self._read_back(final)
        passing("save: verified")
        self._passed_over.discard(final)
        with writing(self.folder / folders.INDEX):
            folders.write_index(self.folder, final, final if best else self.best())
        passing("save: indexed")
        self._prune(final)

    def _make_folder(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self.folder.parent)

    def _write_new(self, final: Path, step: int, content: Content, best: bool) -> None:
        """A draft beside, every file of it and itself synced, then renamed."""
        from .checkpoint_dcp import write_file

        draft = folders.draft_of(final)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            passing("save: begun")
            files = self._write_tensors(draft, content)
            passing("save: tensors written")
            files[STATE] = write_file(draft / STATE, content.tree)
            passing("save: state written")
            when = datetime.now(UTC).isoformat(timespec="seconds")
            form = folders.DIVIDED if content.divided else folders.FORMAT
            manifest = {"format": form, "step": step, "best": best, "when": when, "files": files}
            write_file(draft / folders.MANIFEST, folders.manifest_bytes(manifest))
            passing("save: manifest written")
            sync_folder(draft)
            passing("save: draft synced")
            if os.path.lexists(final):
                folders.set_aside(final)
                passing("save: damaged one set aside")
            os.replace(draft, final)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        passing("save: renamed")
        sync_folder(self.folder)
        passing("save: folder synced")

    def _write_tensors(self, draft: Path, content: Content) -> dict[str, dict[str, Any]]:
        """The files of a state's tensors, and what they are."""
        from .checkpoint_dcp import write_blocks, write_metadata

        return write_metadata(draft, [write_blocks(draft, {**content.blocks, **content.parts})])

    def _fault(self, path: Path, *, from_disk: bool = False) -> str | None:
        """What is wrong with a checkpoint, all of its bytes looked at."""
        if from_disk:
            folders.drop_from_cache(path)
        return folders.fault(path)

    def _read_back(self, path: Path) -> None:
        """Ask the disk, not the memory: an older checkpoint may only go once this one can be read."""
        fault = self._fault(path, from_disk=True)
        if fault is not None:
            raise MachineError(
                f"checkpoint {path.name} was written, but cannot be read back: {fault}",
                where={"folder": path},
                fix="check the disk; older checkpoints are still there",
            )

    def saved(self) -> list[Path]:
        """The checkpoints there are, newest first."""
        return folders.saved(self.folder)

    def best(self) -> Path | None:
        """The newest that was the best when it was saved."""
        return folders.best_of(self.folder, without=self._passed_over)

    @staticmethod
    def fault(path: Path) -> str | None:
        """What is wrong with a checkpoint; none when every file has the size and digest its manifest states."""
        return folders.fault(path)

    def _prune(self, newest: Path) -> None:
        """Drop all but the newest, which is known to be intact, the ones before it that are kept too, and the best."""
        passing("prune: begun")
        kept, best = [newest], self.best()
        for path in self.saved():
            newer = folders.step_of(path) > folders.step_of(newest)
            if path in (newest, best) or (newer and path not in self._passed_over):
                continue
            if not newer and len(kept) < self.keep_last and folders.fault(path, hashed=False) is None:
                kept.append(path)
                continue
            folders.discard(path)
        folders.sweep(self.folder)
        passing("prune: done")

    def load(self, which: str = "last", into: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The newest intact state (or the best one); none when nothing was ever saved.

        Where `into`, a tree like the state's, has a tensor of the same place, shape and type, it is read straight into
        that. A damaged checkpoint is said and passed over for the next older one; when all are damaged that is an
        error, never a silent fresh start.
        """
        self.wait()
        found = self.saved() if which == "last" else [path for path in [self.best()] if path]
        if not found:
            self._require_never_saved(which)
            return None
        gone = which == "last" and self._say_gone(found)
        faults: list[str] = []
        for path in found:
            fault = self._fault(path)
            try:
                state = self._read(path, into) if fault is None else {}
            except folders.Damaged as damage:
                fault = str(damage)
            if fault is None:
                if faults or gone:
                    self.notice(f"going on from checkpoint {path.name}, the newest intact one")
                if which == "last":
                    # A kill between a save and its tidying leaves more than is kept. Damaged ones stay until training
                    # has something newer to put in their place.
                    self._passed_over = set()
                    self._prune(path)
                    self._passed_over = set(found[: len(faults)])
                return state
            faults.append(f"{path.name}: {fault}")
            self.notice(f"checkpoint {path.name} is damaged ({fault})")
        raise DataError(
            f"none of the {len(found)} checkpoints is intact ({faults[0]})",
            where={"folder": self.folder},
            fix="bring the files back, or start a new run",
        )

    def _say_gone(self, found: list[Path]) -> bool:
        """Whether the newest one that index.json knows is not there at all, and not set aside by us either."""
        last = folders.read_index(self.folder).get("last")
        gone = last is not None and self.folder / last not in found and not any(self.folder.glob(f".{last}.*.aside"))
        if gone:
            self.notice(f"checkpoint {last} is gone")
        return gone

    def _require_never_saved(self, which: str) -> None:
        if which == "last" and folders.ever_saved(self.folder):
            raise DataError(
                "there were checkpoints, but none is left",
                where={"folder": self.folder},
                fix="bring the files back, or start a new run",
            )

    def _read(self, path: Path, into: dict[str, Any] | None) -> dict[str, Any]:
        return read_state(path, into)


def read_state(path: Path, into: dict[str, Any] | None) -> dict[str, Any]:
    """The state of a checkpoint whose digests hold."""
    from .checkpoint_dcp import read_blocks

    try:
        room = Rebuilt((path / STATE).read_bytes(), into)
        read_blocks(path, room.wanted)
        state: Any = room.state()
    except Exception as error:
        if out_of_memory(error):
            # An intact checkpoint must not be passed over, and then removed, for what the machine lacks.
            raise MemoryError(str(error)) from error
        if isinstance(error, OSError) and not folders.of_files(error):
            raise folders.unreadable(path, error) from error
        # Its digests hold, so this was written by something else than this version; torch has many words for that.
        first = (str(error).splitlines() or [""])[0]
        raise folders.Damaged(f"it cannot be read: {type(error).__name__}: {first}") from error
    if not isinstance(state, dict):
        raise folders.Damaged("it holds no state")
    return state
