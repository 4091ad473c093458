"""Writes the folder that the MLPerf reference prepares: same names, same content, in bounded memory.

`<folder>/processed_<size>/` gets the sessions, the test day, the popularity of items, the split and the flat-event
cache; `<folder>/shared_metadata/` gets the maps, so that the reference can use the folder directly.

Every file is written atomically and then recorded with its size. A resumed run keeps the files that have the recorded
size and writes the others. `_READY` marks a complete cache and is written last.
"""

from __future__ import annotations

import filecmp
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .... import units
from ....config import within
from ....errors import DataError, MachineError
from ....files import atomic_file, sha256, write_atomic, write_json, writing
from ....folders import LOCK, alone
from ..prepare import piece_rows
from ..raw import RawEvents, RawFiles, need_pyarrow
from ..schema import ALBUMS_FILE, ARTISTS_FILE, GAP_MINUTES, SESSION_GAP_S, TEST_DAYS, TRAIN_DAYS, split_of
from ..store import EventStore, block_digests, verify
from .cache import (
    CACHE_META,
    FLAT_COLUMNS,
    POPULARITY,
    READY,
    RECORD,
    SHARED_MAPS,
    SPLIT_META,
    USER_COLUMNS,
    read_json,
)
from .columns import anchors, flat_blocks, popularity, ranges, user_column
from .sessions import PARQUET_FILES, SESSIONS, TEST_EVENTS, write_sessions

Progress = Callable[[int, int], None]
Tick = Callable[[int], None]
_AGAIN = "run the same command again; it resumes"
_ANCHORS = re.compile(r"/(positions|anchor_ts)_")
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
        cache = f"hstu_cache_L{history_length}"
        least = history_length if min_history is None else min_history
        steps = _steps(files, events, store, processed, cache, history_length, least, block)
        missing = {name for step in steps for name in step.names if not record.has(name)}
        # Anchors may be added to a complete cache, but not columns.
        if any(name.startswith(f"{cache}/") and not _ANCHORS.search(name) for name in missing):
            _withdraw_ready(processed / cache)
            missing.add(f"{cache}/{READY}")
        _require_space(store, processed, cache, missing)
        steps = [step for step in steps if not missing.isdisjoint(step.names)]
        if steps:
            # What is damaged would get valid digests here.
            verify(store)
        total, done = sum(step.work for step in steps), 0

        def tick(work: int) -> None:
            nonlocal done
            done += work
            if progress:
                progress(store.events * done // total, store.events)

        for step in steps:
            names = [name for name in step.names if name in missing]
            step.write(names, tick)
            record.add(names)
    return processed


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
            saved = read_json(path)
            if saved.get("source") != source or not isinstance(saved.get("files"), dict):
                raise DataError(
                    "this folder belongs to other events", where={"folder": processed}, fix="choose another folder"
                )
            self.content["files"] = saved["files"]
        write_json(path, self.content)

    def has(self, *names: str) -> bool:
        return all(self._size(name) == self.content["files"].get(name, {}).get("bytes", -1) for name in names)

    def add(self, names: list[str]) -> None:
        for name in names:
            blocks = [*block_digests(self.processed / name)]
            self.content["files"][name] = {"bytes": self._size(name), "blocks": blocks}
        write_json(self.processed / RECORD, self.content)

    def _size(self, name: str) -> int | None:
        path = self.processed / name
        return path.stat().st_size if path.is_file() else None


@dataclass(frozen=True)
class _Step:
    """Files that are written together, the number of events read for them, and a function that writes those of the
    files that are missing."""

    names: tuple[str, ...]
    work: int
    write: Callable[[list[str], Tick], None]


def _steps(
    files: RawFiles,
    events: RawEvents,
    store: EventStore,
    processed: Path,
    cache: str,
    length: int,
    least: int,
    block: int,
) -> list[_Step]:
    """All steps in their order."""

    def sessions(names: list[str], tick: Tick) -> None:
        paths = {name: processed / name for name in names}
        split = split_of(events.time_range()[1])
        write_sessions(events, store, split, paths, rows=block, fix=_AGAIN, tick=tick)

    def table(name: str, dtype: str, values: Callable[[], NDArray[Any]]) -> _Step:
        return _Step((name,), 0, lambda names, tick: _save_npy(processed / name, dtype, [values()]))

    def column(name: str, dtype: str, blocks: Callable[[], Iterator[NDArray[Any]]]) -> _Step:
        def ticked(tick: Tick) -> Iterator[NDArray[Any]]:
            for (start, stop), values in zip(ranges(store, block), blocks(), strict=True):
                yield values
                tick(stop - start)

        name = f"{cache}/{name}.npy"
        return _Step((name,), store.events, lambda names, tick: _save_npy(processed / name, dtype, ticked(tick)))

    def text(name: str, content: Callable[[], bytes]) -> _Step:
        return _Step((name,), 0, lambda names, tick: write_atomic(processed / name, content(), fix=_AGAIN))

    def anchor_column(kind: str, least: int) -> _Step:
        suffix = "" if least == length else f"_m{least}"
        return column(f"{kind}_L{length}{suffix}", "<i8", lambda: anchors(store, kind, least, block))

    meta = json.dumps({"num_users": store.users, "total_events": store.events}).encode()
    return [
        _Step(PARQUET_FILES, events.rows, sessions),
        table(POPULARITY, "<i8", lambda: popularity(store, block)),
        text(SPLIT_META, lambda: _split(files, events, store, processed)),
        *(column(name, dtype, partial(flat_blocks, store, name, block)) for name, dtype in FLAT_COLUMNS.items()),
        *(
            table(f"{cache}/{name}.npy", dtype, partial(user_column, store, name))
            for name, dtype in USER_COLUMNS.items()
        ),
        text(f"{cache}/{CACHE_META}", lambda: meta),
        *(anchor_column("positions", minimum) for minimum in dict.fromkeys([length, least])),
        anchor_column("anchor_ts", least),
        text(f"{cache}/{READY}", lambda: b""),
    ]


def _split(files: RawFiles, events: RawEvents, store: EventStore, processed: Path) -> bytes:
    earliest, latest = events.time_range()
    parquet = need_pyarrow().parquet
    rows = {name: parquet.read_metadata(processed / name).num_rows for name in (SESSIONS, TEST_EVENTS)}
    content = {
        "size": files.size,
        "t_min": earliest,
        "t_max": latest,
        **vars(split_of(latest)),
        "train_days": TRAIN_DAYS,
        "gap_minutes": GAP_MINUTES,
        "test_days": TEST_DAYS,
        "session_gap_seconds": SESSION_GAP_S,
        "num_train_events": store.events,
        "num_test_events": rows[TEST_EVENTS],
        "num_sessions": rows[SESSIONS],
        "num_users": store.users,
    }
    # The reference ends its files without a line break, and they are compared byte for byte.
    return json.dumps(content, indent=2).encode()


def _withdraw_ready(cache: Path) -> None:
    with writing(cache / READY, fix=_AGAIN):
        cache.mkdir(exist_ok=True)
        (cache / READY).unlink(missing_ok=True)


def _require_space(store: EventStore, processed: Path, cache: str, names: set[str]) -> None:
    """Refuse a disk that is too small before hours of work, not after."""
    needed = store.events * _SESSION_BYTES if SESSIONS in names else 0
    if any(name.startswith(cache) for name in names):
        # The number of anchors is not known in advance.
        flat = sum(np.dtype(kind).itemsize for kind in FLAT_COLUMNS.values())
        cache_bytes = store.events * flat + 8 * store.users + 16 * (int(store.user_ids_U[-1]) + 1)
        needed += cache_bytes - sum(path.stat().st_size for path in (processed / cache).glob("*"))
    free = shutil.disk_usage(processed).free
    if needed > free:
        raise MachineError(
            f"the disk has {units.size(free)} free; the reference's files need at least {units.size(needed)}",
            where={"folder": processed},
            fix="choose a folder on a larger disk",
        )


def _refuse_other_files(processed: Path) -> None:
    """Refuse a folder with files but without a record: recperf did not write it."""
    if processed.is_dir() and not (processed / RECORD).exists():
        others = [path.name for path in sorted(processed.iterdir()) if path.name != LOCK and path.suffix != ".tmp"]
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
        with atomic_file(target, fix=_AGAIN) as file, source.open("rb") as content:
            shutil.copyfileobj(content, file)


def _save_npy(path: Path, dtype: str, blocks: Iterable[NDArray[Any]]) -> None:
    """Write the .npy file that numpy.save would write, from blocks whose total length is not known before."""

    def write_header(length: int) -> None:
        file.seek(0)
        fields = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(file, fields)

    length = 0
    with atomic_file(path, fix=_AGAIN) as file:
        # The header has the same size for every length.
        write_header(0)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).view(np.uint8).data)
            length += len(block)
        write_header(length)
