"""Verifies a reference cache: by digests if recperf wrote it, and by consistency of its columns.

Shapes: E events, U users, B events of a block, I items.

A cache is redundant: users, flags, anchors and counts follow from other columns, and all columns follow from the
sessions next to the cache. The first contradiction is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....files import sha256
from ..schema import DAY_S, EVENT_TYPES, SESSION_GAP_S
from ..store import EventStore, difference
from .cache import (
    CACHE_META,
    FLAT_COLUMNS,
    POPULARITY,
    READY,
    RECORD,
    SHARED_MAPS,
    SPLIT_META,
    USER_COLUMNS,
    column,
    map_npy,
    read_json,
    reference_ratios,
    unusable,
)
from .columns import anchors, flat_column, popularity, ranges, uids_of, user_column
from .session_rows import SessionRows, check_test_events
from .sessions import SESSION_INDEX, SESSIONS, TEST_EVENTS, index_columns, session_columns

Tick = Callable[[int], None]

_BLOCK = 1 << 20
_FLAGS = ("flat_is_listen_plus", "flat_is_like", "flat_is_skip")
_FROM_SESSIONS = tuple(name for name in FLAT_COLUMNS if name not in ("flat_uid", *_FLAGS))
_OPTIONAL = (SESSIONS, SESSION_INDEX, TEST_EVENTS, POPULARITY, SPLIT_META)
_ANCHORS = re.compile(r"(positions|anchor_ts)_L(\d+)(?:_m(\d+))?")


def verify_cache(store: EventStore, progress: Callable[[int, int], None]) -> dict[str, list[str]]:
    """Read a whole cache and the files next to it. Returns file names by how they were verified; a fault is an error.

    By digest: equal to what recperf wrote. By derivation: consistent with other files, from which all of it follows.
    By range: all values are in their ranges. Unverified: not read. Absent: optional files that do not exist.
    """
    job = _Verification(store, progress)
    by_digest = {*job.digests()}
    job.columns()
    job.counts()
    job.anchors()
    compared = job.sessions()
    cache = store.folder.name
    flat = {f"{cache}/{name}.npy" for name in _FROM_SESSIONS}
    derived = {f"{cache}/{name}.npy" for name in ("flat_uid", *_FLAGS, *USER_COLUMNS, *job.anchor_files)}
    derived |= {f"{cache}/{CACHE_META}", f"{cache}/{READY}", *job.existing(POPULARITY, SPLIT_META), *compared}
    ranged = {*job.existing(TEST_EVENTS), *job.maps}
    if SESSIONS in compared:
        derived |= flat
    else:
        ranged |= flat
    return {
        "verified_by_digest": sorted(by_digest),
        "verified_by_derivation": sorted(derived - by_digest),
        "verified_by_range": sorted(ranged - by_digest),
        "unverified": sorted(job.all_files() - derived - ranged - by_digest),
        "absent": sorted({*_OPTIONAL} - {*job.existing(*_OPTIONAL)}),
    }


class _Verification:
    """One pass over a cache."""

    def __init__(self, store: EventStore, progress: Callable[[int, int], None]) -> None:
        self.store, self.progress = store, progress
        self.folder = store.folder.absolute()
        self.processed = self.folder.parent
        self.files, self.map_digests = _recorded(self.processed, self.folder.name)
        self.maps = [f"{SHARED_MAPS}/{path.name}" for path in (self.processed.parent / SHARED_MAPS).glob("*.parquet")]
        self.anchor_files = sorted(
            path.stem for path in self.folder.glob("*.npy") if _ANCHORS.fullmatch(path.stem) is not None
        )
        self.split = self._split()
        self.total = (2 + len(self.anchor_files)) * store.events
        self.total += sum(one["bytes"] for one in self.files.values())
        self.done = 0

    def tick(self, work: int) -> None:
        self.done = min(self.total, self.done + work)
        self.progress(self.store.events * self.done // self.total, self.store.events)

    def existing(self, *names: str) -> list[str]:
        return [name for name in names if (self.processed / name).is_file()]

    def all_files(self) -> set[str]:
        """Files of this cache and next to it, without records and locks."""
        files = [path for place in (self.processed, self.folder) for path in place.iterdir() if path.is_file()]
        return {str(path.relative_to(self.processed)) for path in files if path.name not in (RECORD, "lock", "_lock")}

    def digests(self) -> list[str]:
        """Compare the recorded files with their digests."""
        for name, entry in self.files.items():
            path = self.processed / name
            if not path.is_file():
                raise unusable(path, "is missing; recperf wrote it here")
            reason = difference(path, entry["blocks"], self.tick)
            if reason is not None:
                raise unusable(path, reason)
        for name, digest in self.map_digests.items():
            path = self.processed.parent / SHARED_MAPS / name
            if path.is_file() and sha256(path) != digest:
                raise unusable(path, "differs from its checksum")
        return [*self.files, *(name for name in self.maps if Path(name).name in self.map_digests)]

    def columns(self) -> None:
        """Compare every column with the one that follows from users, items, times, types, ratios and origins."""
        store = self.store
        low, high = (self.split["train_start"], self.split["train_end"]) if self.split else (0, 1 << 32)
        limits = {
            "flat_item_ids": (0, store.items),
            "flat_timestamps": (max(0, low), high),
            "flat_event_types": (0, len(EVENT_TYPES)),
        }
        for name, kind in USER_COLUMNS.items():
            table = column(self.folder, name, kind)
            _compare(self.folder / f"{name}.npy", table, _padded(user_column(store, name), len(table), -1), of="user")
        columns = {name: column(self.folder, name, kind, store.events) for name, kind in FLAT_COLUMNS.items()}
        for start, stop in ranges(store, _BLOCK):
            for name, values in columns.items():
                path, values_B = self.folder / f"{name}.npy", values[start:stop]
                if name in limits:
                    least, end = limits[name]
                    _refuse(path, (values_B < least) | (values_B >= end), start, "event")
                _compare(path, values_B, flat_column(store, name, start, stop), start, "event")
            self.tick(stop - start)

    def counts(self) -> None:
        """Check the popularity, the counts of the split and the test day."""
        if self.existing(POPULARITY):
            path = self.processed / POPULARITY
            stored = map_npy(path, "<i8")
            _compare(path, stored, _padded(popularity(self.store, _BLOCK), len(stored), 0), of="item")
        rows = None
        if self.existing(TEST_EVENTS):
            rows = check_test_events(self.processed / TEST_EVENTS, self.store, self.split)
        if self.split:
            self._require_count("num_train_events", self.store.events)
            self._require_count("num_users", self.store.users)
            if rows is not None:
                self._require_count("num_test_events", rows)

    def anchors(self) -> None:
        """Compare positions and times of anchors with those that follow from the columns."""
        for name in self.anchor_files:
            path, values, done = self.folder / f"{name}.npy", column(self.folder, name, "<i8"), 0
            for block in anchors(self.store, name.partition("_L")[0], _least(name), _BLOCK):
                _compare(path, values[done : done + len(block)], block, done, "anchor")
                done += len(block)
            _compare(path, values[done:], values[:0], done, "anchor")
            self.tick(self.store.events)

    def sessions(self) -> list[str]:
        """Compare sessions and their index with the columns. Returns the names of the compared files."""
        if self.split.get("session_gap_seconds", SESSION_GAP_S) != SESSION_GAP_S:
            return []
        files = {name: SessionRows(self.processed / name) for name in self.existing(SESSIONS, SESSION_INDEX)}
        if not files:
            return []
        ratios_E = reference_ratios(self.store)
        for start, stop in self._whole_users():
            sessions = session_columns(_rows(self.store, ratios_E, slice(start, stop)))
            if SESSIONS in files:
                files[SESSIONS].compare(sessions)
            if SESSION_INDEX in files:
                files[SESSION_INDEX].compare(index_columns(sessions))
            self.tick(stop - start)
        for file in files.values():
            file.end()
        if SESSIONS in files and self.split:
            self._require_count("num_sessions", files[SESSIONS].rows)
        return [*files]

    def _whole_users(self) -> Iterator[tuple[int, int]]:
        """Ranges of the events of whole users, of about a block each."""
        edges = self.store.user_first_U1
        user = 0
        while user < self.store.users:
            end = max(user + 1, int(np.searchsorted(edges, edges[user] + _BLOCK, side="right")) - 1)
            yield int(edges[user]), int(edges[end])
            user = end

    def _require_count(self, name: str, count: int) -> None:
        if self.split.get(name) != count:
            raise unusable(self.processed / SPLIT_META, f"has {self.split.get(name)} for {name}; there are {count}")

    def _split(self) -> dict[str, Any]:
        """The split, after checking its boundaries; empty if there is no file."""
        path = self.processed / SPLIT_META
        if not os.path.lexists(path):
            return {}
        split = read_json(path)
        try:
            names = ("t_min", "t_max", "train_days", "gap_minutes", "test_days")
            earliest, latest, train, gap, test = (int(split[name]) for name in names)
            expected = [latest - test * DAY_S - gap * 60 - train * DAY_S, latest - test * DAY_S - gap * 60]
            expected += [latest - test * DAY_S, latest]
            stated = [int(split[name]) for name in ("train_start", "train_end", "test_start", "test_end")]
        except (ValueError, KeyError, TypeError):
            raise unusable(path, "does not state the split") from None
        if stated != expected or earliest > int(self.store.times_E[self.store.user_first_U1[:-1]].min()):
            raise unusable(path, "contradicts itself")
        return split


def _recorded(processed: Path, cache: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Sizes and digests that recperf recorded for files and maps; empty if it did not write the cache."""
    path = processed / RECORD
    if not os.path.lexists(path):
        return {}, {}
    record = read_json(path)
    try:
        files = {
            str(name): {"bytes": int(one["bytes"]), "blocks": list(one["blocks"])}
            for name, one in record["files"].items()
            if isinstance(one, dict) and ("/" not in name or name.startswith(f"{cache}/"))
        }
        return files, {str(name): str(digest) for name, digest in record.get("maps", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise unusable(path, "cannot be read; it has the digests of the files that recperf wrote") from None


def _rows(store: EventStore, ratios_E: NDArray[np.float32], part: slice) -> dict[str, NDArray[Any]]:
    """Events of a cache in the columns of the sessions; a cache has no track lengths."""
    assert store.flags is not None
    assert store.types_E is not None
    return {
        "uid": uids_of(store, part.start, part.stop).astype(np.uint32),
        "item_ids": store.items_E[part],
        "timestamps": store.times_E[part],
        "event_types": store.types_E[part],
        "is_organic": store.flags[3][part],
        "played_ratio_pct": ratios_E[part],
        "track_length_seconds": np.zeros(part.stop - part.start, np.uint32),
    }


def _least(name: str) -> int:
    """The min_history of a file of anchors."""
    match = _ANCHORS.fullmatch(name)
    assert match is not None
    return int(match[3] or match[2])


def _compare(path: Path, actual: NDArray[Any], expected: NDArray[Any], start: int = 0, of: str = "value") -> None:
    """Require that all bytes are equal: numbers would take -0.0 for 0, and any byte but 0 for True."""
    length = min(len(actual), len(expected))
    words = f"u{actual.itemsize}"
    _refuse(path, actual[:length].view(words) != expected[:length].view(words), start, of)
    if len(actual) != len(expected):
        more = "more" if len(actual) > length else "fewer"
        raise unusable(path, f"has {more} values than follow from other files, first at {of} {start + length:,}")


def _padded(values: NDArray[np.int64], length: int, fill: int) -> NDArray[np.int64]:
    """A table that may be longer than its last entry that counts."""
    return np.pad(values, (0, max(0, length - len(values))), constant_values=fill)


def _refuse(path: Path, faulty: NDArray[np.bool_], start: int, of: str) -> None:
    if faulty.any():
        raise unusable(path, f"contradicts other files, first at {of} {start + int(np.argmax(faulty)):,}")
