"""Writing an event store so that it can be stopped at any moment and is never seen half done.

Columns grow in a folder beside the final one. A commit syncs them and then notes in a journal how long they are and
where the source was; whoever goes on cuts the columns to those lengths and starts there. The last act is a rename.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import alone, sync_folder, write_json, writing
from .schema import EVENT_TYPES, LIKE, LISTEN_PLUS, SKIP, TYPE_SHIFT
from .store import (
    CATALOGUE,
    COLUMNS,
    EVENT_COLUMNS,
    FORMAT,
    MANIFEST,
    USER_COLUMNS,
    VERSION,
    block_digests,
    content_digest,
    file_of,
    map_file,
    seal_of,
)

JOURNAL = "journal.json"
_STRIDE = 1 << 22
_START: dict[str, Any] = {"events": 0, "users": 0, "last_user": -1, "bookmark": None}


class StoreWriter:
    """A store being written. `identity` names the source: a journal of another source is not gone on with.

    `bookmark` is what the last commit was given, or None at the start: where the source is to be read from.
    """

    def __init__(self, folder: Path, *, identity: dict[str, Any], again: str = "the same command") -> None:
        self.folder = folder.expanduser()
        self.draft = self.folder.with_name(self.folder.name + ".building")
        self.identity = json.loads(json.dumps(identity))
        self.again = f"{again} goes on where it stopped"
        self._open = ExitStack()
        self._files: dict[str, IO[bytes]] = {}
        self._state = dict(_START)

    @property
    def bookmark(self) -> Any:
        return self._state["bookmark"]

    @property
    def events(self) -> int:
        return int(self._state["events"])

    def __enter__(self) -> StoreWriter:
        if (self.folder / MANIFEST).exists():
            raise DataError(
                "there is a store already", where={"folder": self.folder}, fix="choose another with --store"
            )
        with self._open:
            self._open.enter_context(alone(self.draft, what="preparing this store", again=self.again))
            self._go_on()
            for name in (*EVENT_COLUMNS, *USER_COLUMNS):
                self._files[name] = self._grown(name)
            self._open = self._open.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for file in self._files.values():
            try:
                file.close()
            except OSError:
                # What could not be written lies beyond what the journal counts; the reason was raised already.
                continue
        self._open.close()

    def append(
        self,
        *,
        uids: NDArray[Any],
        items: NDArray[Any],
        times: NDArray[Any],
        kinds: NDArray[np.uint8],
        ratios: NDArray[Any],
    ) -> None:
        """Events in the order of the store: users ascending, a user's events by time."""
        if not len(uids):
            return
        new = np.flatnonzero(np.diff(uids.astype(np.int64), prepend=self._state["last_user"]))
        starting = uids[new].astype(np.int64)
        if len(starting) and (starting[0] <= self._state["last_user"] or (np.diff(starting) <= 0).any()):
            raise ValueError("users must come in ascending order, each once")
        arrays = {"items": items, "times": times, "kinds": kinds, "ratios": ratios}
        for name, array in arrays.items():
            self._write(name, array)
        self._write("user_ids", starting)
        self._write("user_first", new + self._state["events"])
        self._state["events"] += len(uids)
        self._state["users"] += len(starting)
        self._state["last_user"] = int(uids[-1])

    def commit(self, bookmark: Any) -> None:
        """Everything appended is safe after this."""
        for name, file in self._files.items():
            with writing(file_of(self.draft, name), fix=self.again):
                file.flush()
                os.fsync(file.fileno())
        self._state["bookmark"] = bookmark
        write_json(self.draft / JOURNAL, {"identity": self.identity, **self._state})

    def finish(self, catalogue_I2: NDArray[np.uint32], facts: dict[str, Any]) -> Path:
        """Close the columns, take their digests from the disk, and give the store its name."""
        if not self.events:
            raise DataError("there is no event to train on", where={"folder": self.folder}, fix="check the source")
        # The journal's lengths are still those of the last commit: killed from here on, this part is done again.
        with writing(file_of(self.draft, "user_first"), fix=self.again):
            self._files["user_first"].write(np.array([self.events], COLUMNS["user_first"]).tobytes())
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            self._files = {}
            with file_of(self.draft, CATALOGUE).open("wb") as file:
                file.write(np.ascontiguousarray(catalogue_I2, COLUMNS[CATALOGUE]).tobytes())
                file.flush()
                os.fsync(file.fileno())
        manifest = self._described(len(catalogue_I2), facts)
        write_json(self.draft / MANIFEST, manifest | {"seal": seal_of(manifest)})
        with writing(self.folder, fix=self.again):
            os.rename(self.draft, self.folder)
            sync_folder(self.folder.parent)
            for name in (JOURNAL, "lock"):
                (self.folder / name).unlink(missing_ok=True)
        return self.folder

    def _go_on(self) -> None:
        """Take up the journal of the same source, or begin anew."""
        (self.draft / MANIFEST).unlink(missing_ok=True)
        try:
            journal = json.loads((self.draft / JOURNAL).read_bytes())
            if journal.pop("identity") == self.identity and journal.keys() == _START.keys():
                self._state = journal
                return
        except (OSError, ValueError, AttributeError, KeyError):
            pass
        for path in self.draft.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _grown(self, name: str) -> IO[bytes]:
        path = file_of(self.draft, name)
        rows = self._state["events"] if name in EVENT_COLUMNS else self._state["users"]
        kept = rows * np.dtype(COLUMNS[name]).itemsize
        with writing(path, fix=self.again):
            file = path.open("ab")
            if file.tell() < kept:
                file.close()
                raise DataError(
                    f"{path.name} is shorter than its journal says",
                    where={"file": path},
                    fix=f"remove {self.draft} and begin again",
                )
            file.truncate(kept)
        return file

    def _write(self, name: str, array: NDArray[Any]) -> None:
        with writing(file_of(self.draft, name), fix=self.again):
            self._files[name].write(np.ascontiguousarray(array, COLUMNS[name]).tobytes())

    def _described(self, items: int, facts: dict[str, Any]) -> dict[str, Any]:
        counts = self._counts()
        if counts["largest_item"] >= items:
            raise DataError(
                f"an event has item {counts['largest_item']:,}; the catalogue ends at {items - 1:,}",
                where={"folder": self.draft},
                fix="the catalogue must hold every item that has events",
            )
        columns = {}
        for name in COLUMNS:
            path = file_of(self.draft, name)
            columns[name] = {"bytes": path.stat().st_size, "dtype": COLUMNS[name], "blocks": [*block_digests(path)]}
        return {
            "format": FORMAT,
            "version": VERSION,
            **facts,
            "identity": self.identity,
            "events": self.events,
            "users": self._state["users"],
            "items": items,
            **counts,
            "columns": columns,
            "digest": content_digest(columns),
        }

    def _counts(self) -> dict[str, Any]:
        """What is in the columns, read back from the disk in bounded memory."""
        events = self.events
        mapped = {name: map_file(file_of(self.draft, name), kind) for name, kind in EVENT_COLUMNS.items()}
        by_kind = np.zeros(256, np.int64)
        first, last, largest = 1 << 63, -1, -1
        for start in range(0, events, _STRIDE):
            part = slice(start, min(events, start + _STRIDE))
            by_kind += np.bincount(mapped["kinds"][part], minlength=256)
            first = min(first, int(mapped["times"][part].min()))
            last = max(last, int(mapped["times"][part].max()))
            largest = max(largest, int(mapped["items"][part].max()))
        kinds = np.arange(256)
        return {
            "first_time": first,
            "last_time": last,
            "largest_item": largest,
            "by_type": {
                name: int(by_kind[kinds >> TYPE_SHIFT == index].sum()) for index, name in enumerate(EVENT_TYPES)
            },
            "by_pool": {
                name: int(by_kind[(kinds & bit) > 0].sum())
                for name, bit in (("listen_plus", LISTEN_PLUS), ("like", LIKE), ("skip", SKIP))
            },
        }
