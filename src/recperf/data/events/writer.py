"""Writes an event store so that it can resume after any interruption and is never visible half-written.

Columns grow in a folder `<store>.building`. A commit syncs them and records their lengths, counts and the position in
the source in a journal; a resumed writer truncates the columns to those lengths and continues there. A rename finishes
the store.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import plain_json, sync_folder, write_json, writing
from ...folders import MARK, alone, take_name
from ...jsonfile import Struct, read_sealed, sealed
from .manifest import EventManifest
from .store import (
    COLUMNS,
    EVENT_COLUMNS,
    FORMAT,
    GROUPS,
    MANIFEST,
    USER_COLUMNS,
    VERSION,
    content_digest,
    file_of,
    read_manifest,
    stored_column,
    stored_columns,
)

JOURNAL = "journal.json"
OURS = (
    rf"sorting/|(users|items)\.jsonl|(users|items|context)\.parquet|{re.escape(JOURNAL)}|{re.escape(MANIFEST)}"
    rf"|{'|'.join(re.escape(file_of(Path(), name).name) for name in COLUMNS)}"
)
"""Names of files that recperf writes into a draft: the writer's, and those of an import (sorting, original ids)."""


class Journal(Struct, kw_only=True):
    """What is on disk for certain: lengths, counts, and the position in the source."""

    format: str = FORMAT
    version: int = VERSION
    identity: Any
    by_kind: list[int]
    events: int = 0
    users: int = 0
    last_user: int = -1
    """The user of the last event, -1 before the first."""
    first_time: int = 1 << 32
    last_time: int = -1
    largest_item: int = -1
    bookmark: Any = None


class StoreWriter:
    """A store being written. `identity` names the source: a journal of another source is not resumed.

    `bookmark` is the value of the last commit, None at the start: the position from which to read the source.
    """

    def __init__(self, folder: Path, *, identity: Any, again: str = "run the same command again; it resumes") -> None:
        self.folder = folder.expanduser()
        self.draft = self.folder.with_name(self.folder.name + ".building")
        self.identity = plain(identity)
        self.again = again
        self._open = ExitStack()
        self._handles: dict[str, int] = {}
        self.state = Journal(identity=self.identity, by_kind=[0] * 256)

    @property
    def bookmark(self) -> Any:
        return self.state.bookmark

    @property
    def events(self) -> int:
        return self.state.events

    def __enter__(self) -> StoreWriter:
        self._require_no_other()
        with self._open:
            self._open.enter_context(alone(self.draft, what="preparing this store", ours=OURS, again=self.again))
            # The previous owner of the lock may have finished the store in the meantime.
            self._require_no_other()
            self._resume()
            for name in (*EVENT_COLUMNS, *USER_COLUMNS):
                self._open_column(name, self.state.events if name in EVENT_COLUMNS else self.state.users)
            self._open = self._open.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._open.close()

    def append(self, *, uids: NDArray[Any], items: NDArray[Any], times: NDArray[Any], kinds: NDArray[np.uint8]) -> None:
        """Append events in the order of the store: by user, then by time."""
        if not len(uids):
            return
        state = self.state
        new = np.flatnonzero(uids[1:] != uids[:-1]) + 1
        if int(uids[0]) != state.last_user:
            new = np.concatenate([[0], new])
        starting = uids[new].astype(np.int64)
        if len(starting) and (starting[0] <= state.last_user or (np.diff(starting) <= 0).any()):
            raise ValueError("users must come in ascending order, each once")
        arrays = {"items": items, "times": times, "kinds": kinds}
        arrays |= {"user_ids": starting, "user_first": new + self.events}
        for name, array in arrays.items():
            self._write(name, array)
        state.events += len(uids)
        state.users += len(starting)
        state.last_user = int(uids[-1])
        state.first_time = min(state.first_time, int(times.min()))
        state.last_time = max(state.last_time, int(times.max()))
        state.largest_item = max(state.largest_item, int(items.max()))
        state.by_kind = (np.bincount(kinds, minlength=256) + state.by_kind).tolist()

    def commit(self, bookmark: Any) -> None:
        """Make everything appended so far durable."""
        self._sync()
        self.state.bookmark = bookmark
        write_json(self.draft / JOURNAL, sealed(self.state), fix=self.again)

    def finish(self, groups_IG: NDArray[np.uint32], manifest: EventManifest) -> Path:
        """Complete the columns and the manifest, write it and rename the folder. The groups of items may be none."""
        if not self.events:
            raise DataError("there is no training event", where={"folder": self.folder}, fix="check the source")
        if self.state.largest_item >= len(groups_IG):
            raise DataError(
                f"an event has item {self.state.largest_item:,}; the last of all items is {len(groups_IG) - 1:,}",
                where={"folder": self.draft},
                fix="every item that has events must be among the items",
            )
        # The journal still has the lengths of the last commit: if killed from here on, this part is repeated.
        self._write("user_first", np.array([self.events]))
        if manifest.groups:
            self._open_column(GROUPS, 0)
            self._write(GROUPS, groups_IG)
        self._sync()
        manifest.items = len(groups_IG)
        self._describe(manifest)
        write_json(self.draft / MANIFEST, sealed(manifest.content()), fix=self.again)
        with writing(self.folder, fix=self.again):
            take_name(self.draft, self.folder)
            sync_folder(self.folder.parent)
            _tidy(self.folder)
        return self.folder

    def _require_no_other(self) -> None:
        """Refuse an occupied folder now: the rename at the end would fail."""
        if (self.folder / MANIFEST).exists():
            raise DataError("there is a store already", where={"folder": self.folder}, fix="choose another folder")
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise DataError(
                "the folder of the store is not empty",
                where={"folder": self.folder},
                fix="choose another folder, or remove this one first",
            )

    def _resume(self) -> None:
        """Continue with the journal of the same source, or start over."""
        (self.draft / MANIFEST).unlink(missing_ok=True)
        try:
            journal = read_sealed(self.draft / JOURNAL, (FORMAT, VERSION), Journal, fix=self.again)
            if journal.identity == self.identity:
                self.state = journal
                return
        except DataError:
            pass
        for path in self.draft.iterdir():
            if path.name != MARK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _open_column(self, name: str, rows: int) -> None:
        """Open the file of a column after `rows` rows; what an interrupted writer wrote after them is cut off."""
        path, length = file_of(self.draft, name), rows * np.dtype(COLUMNS[name]).itemsize
        with writing(path, fix=self.again):
            handle = self._handles[name] = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self._open.callback(os.close, handle)
            if os.fstat(handle).st_size < length:
                what = f"{path.name} is shorter than its journal says"
                raise DataError(what, where={"file": path}, fix=f"remove {self.draft} and begin again")
            os.ftruncate(handle, length)
            os.lseek(handle, length, os.SEEK_SET)

    def _write(self, name: str, array: NDArray[Any]) -> None:
        rest = np.ascontiguousarray(array, COLUMNS[name]).reshape(-1).view(np.uint8).data
        with writing(file_of(self.draft, name), fix=self.again):
            # An almost full disk writes a part and fails only at the next call.
            while len(rest):
                rest = rest[os.write(self._handles[name], rest) :]

    def _sync(self) -> None:
        for name, handle in self._handles.items():
            with writing(file_of(self.draft, name), fix=self.again):
                os.fsync(handle)

    def _describe(self, manifest: EventManifest) -> None:
        """Add what was written to the manifest."""
        manifest.format, manifest.version, manifest.identity = FORMAT, VERSION, self.identity
        for name in ("events", "users", "first_time", "last_time", "largest_item"):
            setattr(manifest, name, getattr(self.state, name))
        manifest.by_kind = {str(kind): count for kind, count in enumerate(self.state.by_kind) if count}
        manifest.columns = {name: stored_column(self.draft, name) for name in sorted(stored_columns(manifest.groups))}
        manifest.digest = content_digest(manifest)


def finished(folder: Path, identity: Any) -> bool:
    """Whether the store of this source is complete; a store of another source in its folder is an error."""
    folder = folder.expanduser()
    if not (folder / MANIFEST).is_file():
        return False
    if read_manifest(folder).identity != plain(identity):
        raise DataError(
            "the folder has a store of another source",
            where={"folder": folder},
            fix="choose another folder, or remove this one first",
        )
    with writing(folder):
        _tidy(folder)
    return True


def plain(identity: Any) -> Any:
    """What identifies a source as a file holds it."""
    return json.loads(json.dumps(identity, default=plain_json))


def _tidy(folder: Path) -> None:
    for name in (JOURNAL, MARK):
        (folder / name).unlink(missing_ok=True)
