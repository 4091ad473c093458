"""Verifies a reference cache: by digests if recperf wrote it, and by consistency of its columns.

Shapes: E events, U users, B events of a block, I items.

A cache is redundant: users, flags, anchors and counts follow from other columns, and all columns follow from the
sessions next to the cache. The first contradiction is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....files import sha256
from ..schema import DAY_S, EVENT_TYPES, LEAST_PLAYED, SESSION_GAP_S
from ..store import EventStore, difference
from ..window_build import anchor_chunks
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
    reference_ratios,
    unusable,
)
from .flat_cache import uids_of
from .npy import map_npy
from .session_rows import SessionRows, check_test_events
from .sessions import SESSION_INDEX, SESSIONS, TEST_EVENTS, Cutter

Tick = Callable[[int], None]

_BLOCK = 1 << 20
_FLAGS = ("flat_is_listen_plus", "flat_is_like", "flat_is_skip")
_FROM_SESSIONS = tuple(name for name in FLAT_COLUMNS if name not in ("flat_uid", *_FLAGS))
_OPTIONAL = (SESSIONS, SESSION_INDEX, TEST_EVENTS, POPULARITY, SPLIT_META)
_ANCHORS = re.compile(r"(positions|anchor_ts)_L(\d+)(?:_m(\d+))?")
_MOST_RATIO = (1 << 16) - 1


def verify_cache(store: EventStore, progress: Callable[[int, int], None]) -> dict[str, list[str]]:
    """Read a whole cache and the files next to it. Returns file names by how they were verified; a fault is an error.

    By digest: equal to what recperf wrote. By derivation: consistent with other files, from which all of it follows.
    By range: all values are in their ranges. Unverified: not read. Absent: optional files that do not exist.
    """
    job = _Verification(store, progress)
    by_digest = {*job.digests()}
    job.users()
    job.counts(job.columns())
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
        passes = 2 + len({_least(name) for name in self.anchor_files})
        self.total = passes * store.events + sum(int(one["bytes"]) for one in self.files.values())
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

    def users(self) -> None:
        """Check that the tables have -1 for all users without events; opening has checked the others."""
        ids_U, first_U1 = self.store.user_ids_U, self.store.user_first_U1
        for name, positions_U in (("user_start", first_U1[:-1]), ("user_end", first_U1[1:])):
            table = column(self.folder, name, USER_COLUMNS[name])
            expected = np.full(len(table), -1, np.int64)
            expected[ids_U] = positions_U
            _agree(self.folder / f"{name}.npy", table != expected, 0, "user")

    def columns(self) -> NDArray[np.int64]:
        """Check every event for consistency and valid values. Returns the number of events of each item."""
        store = self.store
        columns = {name: column(self.folder, name, kind, store.events) for name, kind in FLAT_COLUMNS.items()}
        low, high = (self.split["train_start"], self.split["train_end"]) if self.split else (0, 1 << 32)
        counts_I = np.zeros(store.items, np.int64)
        for start in range(0, store.events, _BLOCK):
            stop = min(store.events, start + _BLOCK)
            block = {name: values[start:stop] for name, values in columns.items()}
            times_B, items_B = block["flat_timestamps"], block["flat_item_ids"]
            faults = {
                "flat_uid": block["flat_uid"] != uids_of(store, start, stop),
                "flat_item_ids": (items_B < 0) | (items_B >= store.items),
                "flat_timestamps": (times_B < max(0, low)) | (times_B >= high),
                **_faults_of_kinds(block),
            }
            for name, faulty_B in faults.items():
                _agree(self.folder / f"{name}.npy", faulty_B, start, "event")
            counts_I += np.bincount(items_B, minlength=store.items)
            self.tick(stop - start)
        return counts_I

    def counts(self, counts_I: NDArray[np.int64]) -> None:
        """Check the popularity, the counts of the split and the test day."""
        if self.existing(POPULARITY):
            path = self.processed / POPULARITY
            stored_I = map_npy(path, "<i8", of="the reference cache", fix="count again")
            length = max(len(stored_I), len(counts_I))
            padded = [np.pad(values, (0, length - len(values))) for values in (stored_I, counts_I)]
            _agree(path, padded[0] != padded[1], 0, "item")
        rows = None
        if self.existing(TEST_EVENTS):
            rows = check_test_events(self.processed / TEST_EVENTS, self.store, self.split)
        if self.split:
            self._require_count("num_train_events", self.store.events)
            self._require_count("num_users", self.store.users)
            if rows is not None:
                self._require_count("num_test_events", rows)

    def anchors(self) -> None:
        """Check positions and times of anchors against the flags and the table of users."""
        store = self.store
        for least in sorted({_least(name) for name in self.anchor_files}):
            files = {
                name: column(self.folder, name, "<i8") for name in self.anchor_files if _least(name) == least
            }  # fmt: skip
            done = 0
            for positions in anchor_chunks(store, least):
                stop = done + len(positions)
                for name, values in files.items():
                    expected = positions if name.startswith("positions") else store.times_E[positions]
                    path = self.folder / f"{name}.npy"
                    if len(values) < stop:
                        raise unusable(path, f"has {len(values):,} anchors; there are more")
                    _agree(path, values[done:stop] != expected, done, "anchor")
                done = stop
            for name, values in files.items():
                if len(values) != done:
                    raise unusable(self.folder / f"{name}.npy", f"has {len(values):,} anchors; there are {done:,}")
            self.tick(store.events)

    def sessions(self) -> list[str]:
        """Compare sessions and their index with the columns. Returns the names of the compared files."""
        if self.split.get("session_gap_seconds", SESSION_GAP_S) != SESSION_GAP_S:
            return []
        files = {name: SessionRows(self.processed / name) for name in self.existing(SESSIONS, SESSION_INDEX)}
        if not files:
            return []
        compare = {name: file.compare for name, file in files.items()}
        cutter = Cutter(compare.get(SESSIONS), compare.get(SESSION_INDEX))
        ratios_E = reference_ratios(self.store)
        for start in range(0, self.store.events, _BLOCK):
            part = slice(start, min(self.store.events, start + _BLOCK))
            cutter.take(_rows(self.store, ratios_E, part))
            self.tick(part.stop - start)
        cutter.end()
        for file in files.values():
            file.end()
        if SESSIONS in files and self.split:
            self._require_count("num_sessions", files[SESSIONS].rows)
        return [*files]

    def _require_count(self, name: str, count: int) -> None:
        if self.split.get(name) != count:
            raise unusable(self.processed / SPLIT_META, f"has {self.split.get(name)} for {name}; there are {count}")

    def _split(self) -> dict[str, Any]:
        """The split, after checking its boundaries; empty if there is no file."""
        path = self.processed / SPLIT_META
        if not path.is_file():
            return {}
        try:
            split = dict(json.loads(path.read_bytes()))
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
    if not path.is_file():
        return {}, {}
    try:
        record = json.loads(path.read_bytes())
        files = {
            str(name): {"bytes": int(one["bytes"]), "blocks": list(one["blocks"])}
            for name, one in record["files"].items()
            if isinstance(one, dict) and ("/" not in name or name.startswith(f"{cache}/"))
        }
        return files, {str(name): str(digest) for name, digest in record.get("maps", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise unusable(path, "cannot be read; it has the digests of the files that recperf wrote") from None


def _faults_of_kinds(block: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.bool_]]:
    """Events with an invalid type, ratio or origin, or with flags that do not follow from type and ratio."""
    types_B, ratios_B = block["flat_event_types"], block["flat_played_ratio"]
    listen_B = types_B == 0
    with np.errstate(invalid="ignore"):
        whole_B = ~np.signbit(ratios_B) & (ratios_B <= _MOST_RATIO) & (np.floor(ratios_B) == ratios_B)
        plus_B = listen_B & (ratios_B >= LEAST_PLAYED)
    # Compared as bytes, because numpy treats any byte but 0 as True.
    flags = dict(zip(_FLAGS, (plus_B, types_B == 1, listen_B & ~plus_B), strict=True))
    return {
        "flat_event_types": (types_B < 0) | (types_B >= len(EVENT_TYPES)),
        "flat_played_ratio": ~whole_B,
        "flat_is_organic": block["flat_is_organic"].view(np.uint8) > 1,
        **{name: block[name].view(np.uint8) != expected_B for name, expected_B in flags.items()},
    }


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


def _agree(path: Path, faulty_N: NDArray[np.bool_], start: int, of: str) -> None:
    if faulty_N.any():
        raise unusable(path, f"contradicts other files, first at {of} {start + int(np.argmax(faulty_N)):,}")
