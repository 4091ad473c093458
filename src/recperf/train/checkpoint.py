"""Checkpoints: a folder each, with a manifest of digests, that appears whole or not at all.

checkpoints/
  index.json            {"last": "step-00000626", "best": "step-00000313"}
  step-00000313/        state.pt, manifest.json
  step-00000626/
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from ..errors import DataError
from ..files import sha256, sync_folder, write_json, writing

FORMAT = 1


class _Watched:
    """A file that remembers why a write failed."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        try:
            return self.file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one training; keeps the last and the best."""

    folder: Path
    notice: Callable[[str], None]

    def save(self, step: int, state: dict[str, Any], *, best: bool) -> None:
        """Write to a fresh folder, sync, rename; only then drop what is neither last nor best any more."""
        name = f"step-{step:08d}"
        final = self.folder / name
        with writing(final):
            self.folder.mkdir(parents=True, exist_ok=True)
            fresh = self.folder / f".{name}.{os.getpid()}.tmp"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            try:
                self._fill(fresh, step, state, best)
                if final.exists():
                    # Saved at this step before, as at an epoch's end: the same state, so the fresh copy replaces it.
                    shutil.rmtree(final)
                os.replace(fresh, final)
            except BaseException:
                shutil.rmtree(fresh, ignore_errors=True)
                raise
            sync_folder(self.folder)
        self._prune()

    @staticmethod
    def _fill(fresh: Path, step: int, state: dict[str, Any], best: bool) -> None:
        payload = fresh / "state.pt"
        with payload.open("wb") as file:
            watched = _Watched(file)
            try:
                torch.save(state, cast(BinaryIO, watched))
            except RuntimeError:
                # When a write fails, torch goes on to complain of its own position in the file.
                raise watched.error or OSError(errno.EIO, "torch could not write the state") from None
            file.flush()
            os.fsync(file.fileno())
        entry = {"bytes": payload.stat().st_size, "sha256": sha256(payload)}
        manifest = {"format": FORMAT, "step": step, "best": best, "files": {"state.pt": entry}}
        write_json(fresh / "manifest.json", manifest)

    def saved(self) -> list[Path]:
        """The checkpoints there are, newest first."""
        return sorted((path for path in self.folder.glob("step-*") if path.is_dir()), reverse=True)

    def best(self) -> Path | None:
        """The newest that was the best when it was saved."""
        for path in self.saved():
            try:
                if json.loads((path / "manifest.json").read_bytes())["best"]:
                    return path
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return None

    def _prune(self) -> None:
        kept = {*self.saved()[:1], self.best()}
        for path in [*self.saved(), *self.folder.glob(".step-*")]:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def load(self, which: str = "last") -> dict[str, Any] | None:
        """The newest intact state (or the best one); none when nothing was ever saved.

        A damaged checkpoint is said and passed over for the next older one; when all are damaged that is an error,
        never a silent fresh start.
        """
        saved = self.saved()
        if which == "best":
            saved = [path for path in [self.best()] if path]
        if not saved:
            return None
        for path in saved:
            fault = self.fault(path)
            if fault is None:
                # Mapped, not read: a table may be too large to be in memory twice while it is copied.
                state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True, mmap=True)
                if path == self.saved()[0]:
                    # A kill between a save and its tidying leaves more than two.
                    self._prune()
                return state
            self.notice(f"checkpoint {path.name} is damaged ({fault}); trying an older one")
        raise DataError(
            f"none of the {len(saved)} checkpoints is intact ({fault})",
            where={"folder": self.folder},
            fix="start a new run",
        )

    @staticmethod
    def fault(path: Path) -> str | None:
        """What is wrong with a checkpoint; none when every file has the size and digest its manifest states."""
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            if manifest["format"] != FORMAT:
                return f"format {manifest['format']}, this version reads {FORMAT}"
            if path.name != f"step-{manifest['step']:08d}":
                return f"its manifest is of step {manifest['step']}"
            for name, entry in manifest["files"].items():
                file = path / name
                if not file.is_file():
                    return f"{name} is missing"
                if file.stat().st_size != entry["bytes"]:
                    return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
                if sha256(file) != entry["sha256"]:
                    return f"{name} does not match its digest"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"manifest unreadable: {type(error).__name__}"
        return None
