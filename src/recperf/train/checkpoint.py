"""The checkpoints of one training: complete or not there at all, and read back before older ones are removed."""

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
from torch.utils._pytree import tree_leaves, tree_leaves_with_path

from ..errors import DataError, MachineError
from ..files import draft_of, make_folder, sync_folder, writing
from ..machine import available_bytes, out_of_memory
from ..models.tiers.columns import Sharded, TableColumns
from ..stop import reached
from ..units import size
from . import checkpoint_folder as folders
from .checkpoint_state import Content, StateReader, Written
from .loop import State


@dataclass(kw_only=True)
class CheckpointStore:
    """Holds the last checkpoints and the best one. Only the process that has the run's lock may use it."""

    folder: Path
    notice: Callable[[str], None]
    keep_last: int = 1
    background: bool = False
    """Copy the state to host memory and let a thread write it, one checkpoint at a time."""
    accept: Callable[[int, State], None] = lambda step, state: None
    """Is called with the step and the state of a checkpoint whose digests hold; raises `Damaged` to refuse it."""
    on_disk: Callable[[], None] = lambda: None
    """Is called when a checkpoint can be read from the disk, maybe by the thread that wrote it."""
    ever_saved: Callable[[], bool] = lambda: False
    """Whether there was a checkpoint, as far as something outside the folder tells."""
    _damaged: set[Path] = field(default_factory=set)
    """Checkpoints newer than the loaded one that were damaged at that time."""
    _host_copies: dict[str, Tensor] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _failure: BaseException | None = None

    def save(self, step: int, state: State, *, best: bool) -> None:
        """Save a state. An intact checkpoint of the same step stays, and becomes the best one with `best`."""
        self.wait()
        content = Content.of(state)
        # How many rows there are to copy is known only now; as for the whole state, there must be room for four copies.
        if not self.background or 4 * content.tiered_bytes > available_bytes():
            self._write(step, content, best)
            return
        content = content.copied(self._host_copies)
        # Not a daemon: a process that ends finishes its checkpoint first.
        self._thread = threading.Thread(target=self._try, args=(step, content, best), name="checkpoint", daemon=False)
        self._thread.start()

    def supersede(self, step: int) -> None:
        """Let the next save of this step replace its checkpoint, which lacks the evaluation that was due there."""
        self._damaged.add(self.folder / folders.name_of(step))

    def _try(self, step: int, content: Content, best: bool) -> None:
        try:
            self._write(step, content, best)
        except BaseException as failure:
            self._failure = failure

    def wait(self) -> None:
        """Wait until a background save is on disk; raises the error it ended with."""
        if self._thread:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.wait()
            return
        try:
            self.wait()
        except Exception as failure:
            # The error that ended the training is the one to raise.
            self.notice(f"the last checkpoint was not written: {failure}")

    def _write(self, step: int, content: Content, best: bool) -> None:
        final = self.folder / folders.name_of(step)
        with writing(final):
            make_folder(self.folder)
            exists = os.path.lexists(final) and final not in self._damaged
            if not exists or self._fault(final) is not None:
                self._write_new(final, step, content, best)
                # From the disk, not from memory: older checkpoints may only go once this one can be read.
                if fault := self._fault(final, from_disk=True):
                    raise MachineError(
                        f"checkpoint {final.name} was written, but cannot be read back: {fault}",
                        where={"folder": final},
                        fix="check the disk; older checkpoints are still there",
                    )
        reached("save: verified")
        self._damaged.discard(final)
        with writing(self.folder / folders.INDEX):
            folders.write_index(self.folder, final, final if best else self.best())
        self.on_disk()
        reached("save: indexed")
        self._prune(final)

    def _write_new(self, final: Path, step: int, content: Content, best: bool) -> None:
        """Write a draft beside the final place, sync its files and the draft itself, then rename it."""
        draft = draft_of(final)
        folders.remove(draft)
        draft.mkdir()
        try:
            reached("save: begun")
            written = self._write_tensors(draft, content)
            reached("save: tensors written")
            when = datetime.now(UTC).isoformat(timespec="seconds")
            manifest = manifest_of(content, written, step=step, best=best, when=when)
            with folders.SyncedFile(draft / folders.MANIFEST) as file:
                file.write(folders.manifest_bytes(manifest))
            reached("save: manifest written")
            sync_folder(draft)
            reached("save: draft synced")
            if os.path.lexists(final):
                folders.set_aside(final)
                reached("save: damaged one set aside")
            os.replace(draft, final)
        except BaseException:
            folders.remove(draft)
            raise
        reached("save: renamed")
        sync_folder(self.folder)
        reached("save: folder synced")

    def _write_tensors(self, draft: Path, content: Content) -> list[Written]:
        free = shutil.disk_usage(draft).free
        if content.tiered_bytes and content.nbytes > free:
            # How many rows there would be was not known when the training began.
            raise MachineError(
                f"the checkpoint takes {size(content.nbytes)} of disk; {size(free)} are free",
                where={"folder": self.folder},
                fix="free some space, and resume from the checkpoint before",
            )
        return [content.write(draft)]

    def _fault(self, path: Path, *, from_disk: bool = False) -> str | None:
        """What is wrong with a checkpoint, from reading all of its bytes."""
        if from_disk:
            folders.drop_from_cache(path)
        return folders.fault(path)

    def saved(self) -> list[Path]:
        """All checkpoints, newest first."""
        return folders.saved(self.folder)

    def best(self) -> Path | None:
        """The newest checkpoint that was the best when it was saved."""
        return folders.best_of(self.folder, without=self._damaged)

    def _prune(self, newest: Path) -> None:
        """Remove all but the newest, which is known to be intact, `keep_last` - 1 older ones, and the best."""
        reached("prune: begun")
        remaining, best = [newest], self.best()
        for path in self.saved():
            newer = folders.step_of(path) > folders.step_of(newest)
            if path in (newest, best) or (newer and path not in self._damaged):
                continue
            intact = path not in self._damaged and folders.fault(path, hashed=False) is None
            if not newer and len(remaining) < self.keep_last and intact:
                remaining.append(path)
                continue
            folders.discard(path)
        folders.sweep(self.folder)
        reached("prune: done")

    def load(self, which: str = "last", into: State | None = None) -> State | None:
        """Read the newest intact state (or the best one); none when nothing was ever saved.

        Where `into`, a tree like the state's, has a tensor of the same path, shape and dtype, the data is read
        straight into it. A damaged checkpoint is reported and the next older one used; when all are damaged that is
        an error, never a silent fresh start.
        """
        self.wait()
        if which == "last":
            folders.put_back(self.folder)
        candidates = self.saved() if which == "last" else [path for path in [self.best()] if path]
        if not candidates:
            if which == "last" and (folders.ever_saved(self.folder) or self.ever_saved()):
                raise DataError(
                    "all checkpoints of this training are missing",
                    where={"folder": self.folder},
                    fix="restore the folder from a backup, or start a new run",
                )
            return None
        gone = which == "last" and self._report_gone(candidates)
        faults: list[str] = []
        for path in candidates:
            fault = self._fault(path)
            try:
                state = self._read(path, into) if fault is None else {}
            except folders.Damaged as damage:
                fault = str(damage)
            if fault is None:
                if faults or gone:
                    self.notice(f"continuing from checkpoint {path.name}, the newest intact one")
                if which == "last":
                    # A kill between a save and its pruning leaves too many. Damaged ones stay until training has
                    # something newer to put in their place.
                    self._damaged = set()
                    self._prune(path)
                    self._damaged = set(candidates[: len(faults)])
                    self._report_best(path)
                return state
            faults.append(f"{path.name}: {fault}")
            self.notice(f"checkpoint {path.name} is damaged ({fault})")
        raise DataError(
            f"none of the {len(candidates)} checkpoints is intact ({faults[0]})",
            where={"folder": self.folder},
            fix="restore the files from a backup, or start a new run",
        )

    def _report_gone(self, candidates: list[Path]) -> bool:
        """Whether the last checkpoint of index.json is missing although it was not set aside by a save."""
        last = folders.read_index(self.folder).get("last")
        if last is None or self.folder / last in candidates or any(self.folder.glob(f".{last}.*.aside")):
            return False
        self.notice(f"checkpoint {last} is missing")
        return True

    def _report_best(self, loaded: Path) -> None:
        """Mention a best checkpoint that cannot be used any more: training alone never reads it."""
        if fault := folders.index_fault(self.folder):
            self.notice(f"{fault}; the best checkpoint is the last one that was the best when it was saved")
        name = folders.read_index(self.folder).get("best")
        best = self.folder / name if name else self.best()
        if best is None or best == loaded:
            return
        fault = self._fault(best) if os.path.lexists(best) else "missing"
        if fault is not None:
            state = "missing" if fault == "missing" else f"damaged ({fault})"
            self.notice(f"the best checkpoint {best.name} is {state}; {loaded.name} is intact")

    def _read(self, path: Path, into: State | None) -> State:
        state = read_state(path, into)
        self.accept(folders.step_of(path), state)
        return state


def manifest_of(
    content: Content, written: list[Written], *, step: int, best: bool, when: str
) -> folders.CheckpointManifest:
    """The manifest of a state, from what all ranks wrote."""
    for path, tensor in content.tensors.items():
        tensor.shards = tuple(shard for each in written for shard in each.shards.get(path, []))
    files = {name: facts for each in written for name, facts in each.files.items()}
    return folders.CheckpointManifest(
        format=folders.FORMAT, step=step, best=best, when=when, files=files, tensors=content.tensors, state=content.tree
    )


def read_state(path: Path, into: State | None = None, *, part: tuple[str, ...] = ()) -> State:
    """Read the state of a checkpoint whose digests hold, or a part of it, such as ("trial", "model")."""
    try:
        manifest = folders.read_manifest(path)
        tree = manifest.state
        for name in part:
            tree = tree[name]
        state = StateReader(path, manifest.files, manifest.tensors).read(tree, into)
    except folders.Damaged:
        raise
    except Exception as error:
        if out_of_memory(error):
            # An intact checkpoint must not be skipped, and later removed, because the machine lacks memory.
            raise MemoryError(str(error)) from error
        if isinstance(error, OSError) and not folders.is_damage(error):
            raise folders.unreadable(path, error) from error
        # Its digests hold, so something other than this version wrote it.
        first_line = (str(error).splitlines() or [""])[0]
        raise folders.Damaged(f"it cannot be read: {type(error).__name__}: {first_line}") from error
    if not isinstance(state, dict):
        raise folders.Damaged("its state is not a JSON object")
    return state


def tensor_bytes(value: Any) -> int:
    """The bytes of all tensors in a tree; of one in tiers those of the rows that were written, and their numbers."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor | Sharded | TableColumns))


def shape_mismatch(ours: Any, saved: Any) -> str | None:
    """The first tensor that has another shape in a saved tree, in a line; none where all that are in both agree."""
    kinds = Tensor | Sharded | TableColumns
    by_path = dict(tree_leaves_with_path(saved))
    for path, leaf in tree_leaves_with_path(ours):
        other = by_path.get(path)
        if isinstance(leaf, kinds) and isinstance(other, kinds) and tuple(leaf.shape) != tuple(other.shape):
            shown = "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
            return f"{shown} is {tuple(leaf.shape)}, the checkpoint's {tuple(other.shape)}"
    return None
