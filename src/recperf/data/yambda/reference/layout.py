"""Writes the folder that the MLPerf reference prepares: same names, same content, in bounded memory.

`<folder>/processed_<size>/` gets the sessions, the test day, the popularity of items, the split and the flat-event
cache; `<folder>/shared_metadata/` gets the maps, so that the reference can use the folder directly.

Every file is written atomically and then recorded with its size. A resumed run keeps the files that have the recorded
size and writes the others. `_READY` marks a complete cache and is written last.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from .... import units
from ....config import within
from ....errors import DataError, MachineError
from ....files import alone, sha256, write_json, writing
from ..prepare import piece_rows, split_of
from ..raw import RawEvents, RawFiles, need_pyarrow
from ..schema import ALBUMS_FILE, ARTISTS_FILE, GAP_MINUTES, SESSION_GAP_S, TEST_DAYS, TRAIN_DAYS
from ..store import EventStore
from .cache import CACHE_META, FLAT_COLUMNS, POPULARITY, READY, RECORD, SHARED_MAPS, SPLIT_META, USER_COLUMNS
from .flat_cache import anchor_times, anchors, flat_column, least_bytes, popularity, user_column
from .npy import digested_file, save_blocks
from .sessions import PARQUET_FILES, SESSIONS, TEST_EVENTS, write_sessions

Progress = Callable[[int, int], None]
Tick = Callable[[int], None]
Digests = dict[str, list[str]]
"""Digests of the blocks of files, by file name."""
_AGAIN = "run the same command again; it resumes"
_SHARE = 2
"""A row needs this many times the memory of preparing it: lists are built and a row group is compressed."""
_SESSION_BYTES = 8
"""A lower bound of the bytes per event in the file of sessions."""


def write_layout(
    files: RawFiles,
    store: EventStore,
    folder: Path,
    *,
    history_length: int,
    min_history: int | None = None,
    memory: int = 1 << 30,
    block: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the reference's folder from raw files and the store prepared from them. Returns its `processed_` folder.

    Anchors are always written for `min_history` equal to the history length, the reference's default; another
    `min_history` adds its own files. Times of anchors are written for the requested `min_history`. `block` events are
    processed at a time, by default as many as `memory` allows.
    """
    within(1, history_length, 1 << 20, "history_length")
    within(0, history_length if min_history is None else min_history, 1 << 40, "min_history")
    if store.layout != "packed":
        raise DataError(
            "this is a cache of the reference already", where={"folder": store.folder}, fix="use it as it is"
        )
    if block is None:
        block = piece_rows(memory, 8 * int(store.manifest["largest_item"])) // _SHARE
    within(1, block, 1 << 32, "block")
    events = RawEvents(files.events)
    processed = folder.expanduser() / f"processed_{files.size}"
    _refuse_other_files(processed)
    with alone(processed, what="writing this folder", again=_AGAIN):
        record = _Record(processed, files, events, store)
        _copy_maps(files, folder.expanduser() / SHARED_MAPS)
        layout = _Layout(files, events, store, processed, history_length, min_history, block)
        layout.withdraw_ready(record)
        steps = [step for step in layout.steps() if not record.has(*step.names)]
        layout.require_space(steps)
        total, done = sum(step.work for step in steps), 0

        def tick(work: int) -> None:
            nonlocal done
            done += work
            if progress:
                progress(store.events * done // total, store.events)

        for step in steps:
            record.add(step.write([name for name in step.names if not record.has(name)], tick))
        (processed / "lock").unlink(missing_ok=True)
    return processed


@dataclass(frozen=True)
class _Step:
    """Files that are written together and the number of events read for them.

    `write` receives the names of the missing files and returns their digests.
    """

    names: tuple[str, ...]
    work: int
    write: Callable[[list[str], Tick], Digests]


class _Record:
    """Sizes and digests of the finished files; `data check` reads the digests."""

    def __init__(self, processed: Path, files: RawFiles, events: RawEvents, store: EventStore) -> None:
        self.processed = processed
        source = {"store": store.digest, "events": events.identity}
        facts = {name: store.manifest[name] for name in ("name", "synthetic", "licence") if name in store.manifest}
        maps = {ARTISTS_FILE: sha256(files.artists), ALBUMS_FILE: sha256(files.albums)}
        self.content: dict[str, Any] = {"source": source, "facts": facts, "maps": maps, "files": {}}
        path = processed / RECORD
        if path.exists():
            saved: dict[str, Any] = {}
            with suppress(ValueError, TypeError):
                saved = dict(json.loads(path.read_bytes()))
            if saved.get("source") != source or not isinstance(saved.get("files"), dict):
                raise DataError(
                    "this folder belongs to other events", where={"folder": processed}, fix="choose another folder"
                )
            self.content["files"] = {name: one for name, one in saved["files"].items() if isinstance(one, dict)}
        for draft in processed.glob("*/.*.tmp"):
            draft.unlink()
        write_json(path, self.content)

    def has(self, *names: str) -> bool:
        return all(self._size(name) == self.content["files"].get(name, {}).get("bytes", -1) for name in names)

    def add(self, written: Digests) -> None:
        self.content["files"] |= {
            name: {"bytes": self._size(name), "blocks": blocks} for name, blocks in written.items()
        }
        write_json(self.processed / RECORD, self.content)

    def _size(self, name: str) -> int | None:
        path = self.processed / name
        return path.stat().st_size if path.is_file() else None


@dataclass(frozen=True)
class _Layout:
    """All files of the folder and how each is written."""

    files: RawFiles
    events: RawEvents
    store: EventStore
    processed: Path
    history_length: int
    min_history: int | None
    block: int

    @property
    def cache(self) -> str:
        return f"hstu_cache_L{self.history_length}"

    def steps(self) -> list[_Step]:
        """All steps in their order."""
        return [
            _Step(PARQUET_FILES, self.events.rows, self._parquet),
            self._column(POPULARITY, "<i8", self.store.events, lambda tick: [popularity(self.store, self.block, tick)]),
            _Step((SPLIT_META,), 0, lambda names, tick: self._json(SPLIT_META, self._split(), indent=2)),
            *self._column_steps(),
            *self._anchor_steps(),
            _Step((f"{self.cache}/{READY}",), 0, lambda names, tick: self._file(names[0], b"")),
        ]

    def withdraw_ready(self, record: _Record) -> None:
        """Remove the mark of a cache that lacks a column. Anchors may be added to a complete cache."""
        if not all(record.has(*step.names) for step in self._column_steps()):
            path = self.processed / self.cache / READY
            with writing(path, fix=_AGAIN):
                path.parent.mkdir(exist_ok=True)
                path.unlink(missing_ok=True)

    def require_space(self, steps: list[_Step]) -> None:
        """Refuse a disk that is too small before hours of work, not after."""
        names = {name for step in steps for name in step.names}
        needed = self.store.events * _SESSION_BYTES if SESSIONS in names else 0
        if any(name.startswith(self.cache) for name in names):
            written = sum(path.stat().st_size for path in (self.processed / self.cache).glob("*"))
            needed += least_bytes(self.store) - written
        free = shutil.disk_usage(self.processed).free
        if needed > free:
            raise MachineError(
                f"the disk has {units.size(free)} free; the reference's files need at least {units.size(needed)}",
                where={"folder": self.processed},
                fix="choose a folder on a larger disk",
            )

    def _column(self, name: str, dtype: str, work: int, blocks: Callable[[Tick], Iterable[NDArray[Any]]]) -> _Step:
        """The step that writes one .npy file."""

        def write(names: list[str], tick: Tick) -> Digests:
            return {name: save_blocks(self.processed / name, dtype, blocks(tick), fix=_AGAIN)}

        return _Step((name,), work, write)

    def _column_steps(self) -> list[_Step]:
        store, meta = self.store, {"num_users": self.store.users, "total_events": self.store.events}
        flat = [
            self._column(f"{self.cache}/{name}.npy", dtype, store.events, partial(flat_column, store, name, self.block))
            for name, dtype in FLAT_COLUMNS.items()
        ]
        users = [
            self._column(f"{self.cache}/{name}.npy", dtype, 0, partial(self._user_column, name))
            for name, dtype in USER_COLUMNS.items()
        ]
        return [
            *flat,
            *users,
            _Step((f"{self.cache}/{CACHE_META}",), 0, lambda names, tick: self._json(names[0], meta)),
        ]

    def _user_column(self, name: str, tick: Tick) -> list[NDArray[Any]]:
        return [user_column(self.store, name)]

    def _anchor_steps(self) -> list[_Step]:
        default = self.history_length
        requested = default if self.min_history is None else self.min_history

        def step(kind: str, least: int, blocks: Callable[..., Iterable[NDArray[Any]]]) -> _Step:
            suffix = "" if least == default else f"_m{least}"
            name = f"{self.cache}/{kind}_L{default}{suffix}.npy"
            return self._column(name, "<i8", self.store.events, partial(blocks, self.store, least, self.block))

        leasts = dict.fromkeys([default, requested])
        return [*(step("positions", least, anchors) for least in leasts), step("anchor_ts", requested, anchor_times)]

    def _parquet(self, names: list[str], tick: Tick) -> Digests:
        _, latest = self.events.time_range()
        return write_sessions(
            self.events,
            self.store,
            split_of(latest),
            {name: self.processed / name for name in names},
            rows=self.block,
            fix=_AGAIN,
            tick=tick,
        )

    def _json(self, name: str, content: dict[str, Any], indent: int | None = None) -> Digests:
        # The reference ends its files without a line break, and they are compared byte for byte.
        return self._file(name, json.dumps(content, indent=indent).encode())

    def _file(self, name: str, content: bytes) -> Digests:
        with digested_file(self.processed / name, fix=_AGAIN) as file:
            file.write(content)
        return {name: file.blocks()}

    def _split(self) -> dict[str, Any]:
        earliest, latest = self.events.time_range()
        parquet = need_pyarrow().parquet
        rows = {name: parquet.read_metadata(self.processed / name).num_rows for name in (SESSIONS, TEST_EVENTS)}
        return {
            "size": self.files.size,
            "t_min": earliest,
            "t_max": latest,
            **vars(split_of(latest)),
            "train_days": TRAIN_DAYS,
            "gap_minutes": GAP_MINUTES,
            "test_days": TEST_DAYS,
            "session_gap_seconds": SESSION_GAP_S,
            "num_train_events": self.store.events,
            "num_test_events": rows[TEST_EVENTS],
            "num_sessions": rows[SESSIONS],
            "num_users": self.store.users,
        }


def _refuse_other_files(processed: Path) -> None:
    """Refuse a folder with files but without a record: recperf did not write it."""
    if processed.is_dir() and not (processed / RECORD).exists():
        others = [path.name for path in sorted(processed.iterdir()) if path.name != "lock" and path.suffix != ".tmp"]
        if others:
            raise DataError(
                f"there are files here that recperf did not write: {', '.join(others[:4])}",
                where={"folder": processed},
                fix="choose another folder; a complete cache can be used as it is",
            )


def _copy_maps(files: RawFiles, folder: Path) -> None:
    """Copy the maps to the folder in which the reference looks for them."""
    for source, name in ((files.artists, ARTISTS_FILE), (files.albums, ALBUMS_FILE)):
        target = folder / name
        if target.exists():
            if not (target.samefile(source) or filecmp.cmp(source, target, shallow=False)):
                raise DataError("the folder has another map", where={"file": target}, fix="choose another folder")
            continue
        with writing(target, fix=_AGAIN):
            folder.mkdir(parents=True, exist_ok=True)
        with digested_file(target, fix=_AGAIN) as file, source.open("rb") as content:
            shutil.copyfileobj(content, file)
