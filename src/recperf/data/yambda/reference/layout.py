"""The folder the MLPerf reference prepares, written by recperf: same names, same content, in bounded memory.

`<folder>/processed_<size>/` gets the sessions, the test day, the popularity of items, the split and the flat-event
cache; `<folder>/shared_metadata/` the maps, so that the reference can be pointed at the folder as it is.

Every file is written beside its place and renamed, then noted with its size. Whoever goes on keeps the files that have
the size noted and writes the others; `_READY` says that a cache is whole and comes last.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .... import units
from ....config import within
from ....errors import DataError, MachineError
from ....files import alone, sha256, write_json, writing
from ..prepare import piece_rows, split_of
from ..raw import RawEvents, RawFiles, need_pyarrow
from ..schema import ALBUMS_FILE, ARTISTS_FILE, GAP_MINUTES, SESSION_GAP_S, TEST_DAYS, TRAIN_DAYS
from ..store import EventStore
from .cache import (
    CACHE_META,
    FLAT_COLUMNS,
    NOTES,
    POPULARITY,
    READY,
    SHARED_MAPS,
    SPLIT_META,
    USER_COLUMNS,
)
from .flat_cache import anchor_times, anchors, flat_column, least_bytes, popularity, user_column
from .npy import drafted, save_blocks
from .sessions import PARQUET_FILES, SESSIONS, TEST_EVENTS, write_sessions

Progress = Callable[[int, int], None]
Tick = Callable[[int], None]
Digests = dict[str, list[str]]
"""Digests of the blocks of files, by name."""
_AGAIN = "the same command goes on where it stopped"
_SHARE = 2
"""A row takes this many times the memory it takes to prepare it: lists are built and a row group is compressed."""
_SESSION_BYTES = 8
"""Less than an event takes in the sessions' file; what is surely needed, not what is expected."""


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
    """Write the reference's folder from the raw files and the store prepared from them. The `processed_` folder.

    Anchors are always written for `min_history` equal to the history's length, the reference's default; another
    `min_history` adds files for itself. Times of anchors are written for the one asked for. `block` events are worked
    on at a time, as many as `memory` allows where it is not given.
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
    _must_be_ours(processed)
    with alone(processed, what="writing this folder", again=_AGAIN):
        notes = _Notes(processed, files, events, store)
        _share_maps(files, folder.expanduser() / SHARED_MAPS)
        job = _Job(files, events, store, processed, history_length, min_history, block)
        job.take_back_ready(notes)
        steps = [step for step in job.steps() if not notes.has(*step.names)]
        job.require_room(steps)
        clock = _Clock(sum(step.work for step in steps), store.events, progress)
        for step in steps:
            notes.add(step.write([name for name in step.names if not notes.has(name)], clock.tick))
        (processed / "lock").unlink(missing_ok=True)
    return processed


@dataclass(frozen=True)
class _Step:
    """Files written together, the events that are passed over for them, and how; only missing ones are asked for, and
    the digests of those are the answer."""

    names: tuple[str, ...]
    work: int
    write: Callable[[list[str], Tick], Digests]


class _Clock:
    """Adds up what is done and tells it as a share of all events, each of which is passed over many times."""

    def __init__(self, total: int, events: int, progress: Progress | None) -> None:
        self.done, self.total, self.events, self.progress = 0, total, events, progress

    def tick(self, work: int) -> None:
        self.done += work
        if self.progress:
            self.progress(self.events * self.done // self.total, self.events)


class _Notes:
    """Which files are finished: those noted here that still have the size noted. `data check` reads the digests."""

    def __init__(self, processed: Path, files: RawFiles, events: RawEvents, store: EventStore) -> None:
        self.processed = processed
        source = {"store": store.digest, "events": events.identity}
        facts = {name: store.manifest[name] for name in ("name", "synthetic", "licence") if name in store.manifest}
        maps = {ARTISTS_FILE: sha256(files.artists), ALBUMS_FILE: sha256(files.albums)}
        self.content: dict[str, Any] = {"source": source, "facts": facts, "maps": maps, "files": {}}
        path = processed / NOTES
        if path.exists():
            found: dict[str, Any] = {}
            with suppress(ValueError, TypeError):
                found = dict(json.loads(path.read_bytes()))
            if found.get("source") != source or not isinstance(found.get("files"), dict):
                raise DataError(
                    "this folder was begun from other events", where={"folder": processed}, fix="choose another folder"
                )
            self.content["files"] = {name: one for name, one in found["files"].items() if isinstance(one, dict)}
        for draft in processed.glob("*/.*.tmp"):
            draft.unlink()
        write_json(path, self.content)

    def has(self, *names: str) -> bool:
        return all(self._size(name) == self.content["files"].get(name, {}).get("bytes", -1) for name in names)

    def add(self, written: Digests) -> None:
        self.content["files"] |= {
            name: {"bytes": self._size(name), "blocks": blocks} for name, blocks in written.items()
        }
        write_json(self.processed / NOTES, self.content)

    def _size(self, name: str) -> int | None:
        path = self.processed / name
        return path.stat().st_size if path.is_file() else None


@dataclass(frozen=True)
class _Job:
    """What is to be written, file by file."""

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
        """Every step in its order."""
        count = self.store.events
        steps = [
            _Step(PARQUET_FILES, self.events.rows, self._parquet),
            _Step((POPULARITY,), count, self._popularity),
            _Step((SPLIT_META,), 0, lambda names, tick: self._json(names[0], self._split(), indent=2)),
        ]
        ready = _Step((f"{self.cache}/{READY}",), 0, self._ready)
        return [*steps, *self._column_steps(), *self._anchor_steps(), ready]

    def take_back_ready(self, notes: _Notes) -> None:
        """A cache that lacks a column is not ready, whatever was true before. Anchors may be added to a ready one."""
        if not all(notes.has(*step.names) for step in self._column_steps()):
            path = self.processed / self.cache / READY
            with writing(path, fix=_AGAIN):
                path.parent.mkdir(exist_ok=True)
                path.unlink(missing_ok=True)

    def require_room(self, steps: list[_Step]) -> None:
        """Hours of work should not end at a full disk that was too small from the start."""
        names = {name for step in steps for name in step.names}
        needed = self.store.events * _SESSION_BYTES if SESSIONS in names else 0
        if any(name.startswith(self.cache) for name in names):
            needed += least_bytes(self.store) - self._bytes_there()
        free = shutil.disk_usage(self.processed).free
        if needed > free:
            raise MachineError(
                f"the disk has room for {units.size(free)}; the reference's files need at least {units.size(needed)}",
                where={"folder": self.processed},
                fix="choose a folder on a larger disk",
            )

    def _bytes_there(self) -> int:
        return sum(path.stat().st_size for path in (self.processed / self.cache).glob("*"))

    def _cached(self, name: str) -> str:
        return f"{self.cache}/{name}.npy"

    def _column_steps(self) -> list[_Step]:
        meta = {"num_users": self.store.users, "total_events": self.store.events}
        return [
            *(_Step((self._cached(name),), self.store.events, self._flat) for name in FLAT_COLUMNS),
            *(_Step((self._cached(name),), 0, self._users) for name in USER_COLUMNS),
            _Step((f"{self.cache}/{CACHE_META}",), 0, lambda names, tick: self._json(names[0], meta)),
        ]

    def _anchor_steps(self) -> list[_Step]:
        usual, count = self.history_length, self.store.events
        asked = usual if self.min_history is None else self.min_history

        def step(kind: str, least: int, blocks: Callable[..., Any]) -> _Step:
            suffix = "" if least == usual else f"_m{least}"
            name = self._cached(f"{kind}_L{usual}{suffix}")

            def write(names: list[str], tick: Tick) -> Digests:
                values = blocks(self.store, least, self.block, tick)
                return {name: save_blocks(self.processed / name, "<i8", values, fix=_AGAIN)}

            return _Step((name,), count, write)

        leasts = [usual] if asked == usual else [usual, asked]
        return [step("positions", least, anchors) for least in leasts] + [step("anchor_ts", asked, anchor_times)]

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

    def _popularity(self, names: list[str], tick: Tick) -> Digests:
        counts = popularity(self.store, self.block, tick)
        return {names[0]: save_blocks(self.processed / names[0], "<i8", [counts], fix=_AGAIN)}

    def _flat(self, names: list[str], tick: Tick) -> Digests:
        path = self.processed / names[0]
        blocks = flat_column(self.store, path.stem, self.block, tick)
        return {names[0]: save_blocks(path, FLAT_COLUMNS[path.stem], blocks, fix=_AGAIN)}

    def _users(self, names: list[str], tick: Tick) -> Digests:
        path = self.processed / names[0]
        table = user_column(self.store, path.stem)
        return {names[0]: save_blocks(path, USER_COLUMNS[path.stem], [table], fix=_AGAIN)}

    def _ready(self, names: list[str], tick: Tick) -> Digests:
        return self._file(names[0], b"")

    def _json(self, name: str, content: dict[str, Any], indent: int | None = None) -> Digests:
        # The reference ends its files without a line break, and they are compared byte for byte.
        return self._file(name, json.dumps(content, indent=indent).encode())

    def _file(self, name: str, content: bytes) -> Digests:
        with drafted(self.processed / name, fix=_AGAIN) as file:
            file.write(content)
        return {name: file.blocks()}

    def _split(self) -> dict[str, Any]:
        earliest, latest = self.events.time_range()
        split = split_of(latest)
        parquet = need_pyarrow().parquet
        rows = {name: parquet.read_metadata(self.processed / name).num_rows for name in (SESSIONS, TEST_EVENTS)}
        return {
            "size": self.files.size,
            "t_min": earliest,
            "t_max": latest,
            "train_start": split.train_start,
            "train_end": split.train_end,
            "test_start": split.test_start,
            "test_end": split.test_end,
            "train_days": TRAIN_DAYS,
            "gap_minutes": GAP_MINUTES,
            "test_days": TEST_DAYS,
            "session_gap_seconds": SESSION_GAP_S,
            "num_train_events": self.store.events,
            "num_test_events": rows[TEST_EVENTS],
            "num_sessions": rows[SESSIONS],
            "num_users": self.store.users,
        }


def _must_be_ours(processed: Path) -> None:
    """Nobody's files are overwritten: a folder with content but without notes is someone else's."""
    if processed.is_dir() and not (processed / NOTES).exists():
        others = [path.name for path in sorted(processed.iterdir()) if path.name != "lock" and path.suffix != ".tmp"]
        if others:
            raise DataError(
                f"there are files here that recperf did not write: {', '.join(others[:4])}",
                where={"folder": processed},
                fix="choose another folder; a finished cache can be used as it is",
            )


def _share_maps(files: RawFiles, place: Path) -> None:
    """Put the maps where the reference looks for them."""
    for source, name in ((files.artists, ARTISTS_FILE), (files.albums, ALBUMS_FILE)):
        target = place / name
        if target.exists():
            if not (target.samefile(source) or filecmp.cmp(source, target, shallow=False)):
                raise DataError(
                    "there is another map here already", where={"file": target}, fix="choose another folder"
                )
            continue
        with writing(target, fix=_AGAIN):
            place.mkdir(parents=True, exist_ok=True)
        with drafted(target, fix=_AGAIN) as file, source.open("rb") as content:
            shutil.copyfileobj(content, file)
