"""Reads raw files and stores completely and checks them. The first fault is an error.

Shapes: E events, U users, N events of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from .maps import catalogue
from .originals import originals
from .raw import RawEvents, RawFiles, require_known
from .reference import check_cache
from .schema import EVENT_TYPES
from .store import COLUMNS, EventStore, file_of, verify
from .windows import verify_indexes

Progress = Callable[[int, int], None]
_STRIDE = 1 << 22


def check_raw(files: RawFiles, progress: Progress) -> dict[str, Any]:
    """Check schema, values and order of raw files."""
    raw = RawEvents(files.events)
    items = len(catalogue(files.artists, files.albums))
    by_type = np.zeros(len(EVENT_TYPES), np.int64)
    users, last_user, largest = 0, -1, -1
    for chunk in raw.chunks(0, _STRIDE):
        by_type += np.bincount(chunk.types, minlength=len(EVENT_TYPES))
        users += int(np.count_nonzero(np.diff(chunk.uids.astype(np.int64), prepend=last_user)))
        last_user = int(chunk.uids[-1])
        require_known(chunk, items, files)
        largest = max(largest, int(chunk.items.max()))
        progress(chunk.first_row + len(chunk), raw.rows)
    first, last = raw.time_range()
    return {
        "file": str(files.events),
        "events": raw.rows,
        "users": users,
        "items": items,
        "largest_item": largest,
        "first_time": first,
        "last_time": last,
        "by_type": dict(zip(EVENT_TYPES, map(int, by_type))),
        "footer_sha256": raw.identity["sha256"],
    }


def check_store(store: EventStore, progress: Progress) -> dict[str, Any]:
    """Compare a store with its digests, or the columns of a reference cache with each other, then check the order of
    its events.

    `verified_by_digest` names the files that were compared with digests. A damaged index of windows is an error too,
    because it decides which events are trained on.
    """

    def first_half(done: int, total: int) -> None:
        progress(store.events * done // total // 2, store.events)

    files: list[str] = []
    if store.layout == "packed":
        verify(store, first_half)
        lists = sorted(store.manifest.get("originals", {}))
        for role in lists:
            originals(store.folder, role)
        files = [*(file_of(store.folder, name).name for name in COLUMNS), *(f"{role}.jsonl" for role in lists)]
    indexes = verify_indexes(store)
    if not store.users_cover_events():
        raise _unusable(store.folder, "the table of users does not cover the events")
    if (np.diff(store.user_ids_U) <= 0).any():
        raise _unusable(store.folder, "users are not in ascending order")
    for start in range(0, store.events, _STRIDE):
        part = slice(start, min(store.events, start + _STRIDE))
        _check_order(store, part)
        if store.layout == "reference":
            check_cache(store, part)
        progress((store.events + part.stop) // 2, store.events)
    return {
        "folder": str(store.folder),
        "layout": store.layout,
        "events": store.events,
        "users": store.users,
        "items": store.manifest.get("distinct", {}).get("items", store.items),
        "digest": store.digest,
        "verified_by_digest": sorted(files),
        "indexes": indexes,
    }


def _check_order(store: EventStore, part: slice) -> None:
    """Require that no event is earlier than the previous one of its user."""
    # One event more, to check the step into the next chunk.
    times_N = store.times_E[part.start : part.stop + 1].astype(np.int64)
    backwards_N = np.flatnonzero(np.diff(times_N) < 0) + part.start + 1
    first_U = store.user_first_U1[:-1]
    within_user = backwards_N[~np.isin(backwards_N, first_U)]
    if len(within_user):
        raise _unusable(store.folder, f"event {int(within_user[0]):,} is earlier than the previous one")


def _unusable(folder: Path, what: str) -> DataError:
    return DataError(f"this store cannot be used: {what}", where={"folder": folder}, fix="prepare it again")
