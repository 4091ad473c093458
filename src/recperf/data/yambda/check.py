"""Reads raw files and stores completely and checks them. The first fault is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .maps import catalogue
from .raw import RawEvents, RawFiles, require_known
from .reference import check_cache
from .schema import EVENT_TYPES
from .store import COLUMNS, EventStore, file_of, originals, verify

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
    """Compare a store with its digests, or the columns of a reference cache with each other.

    `verified_by_digest` names the files that were compared with digests.
    """
    files: list[str] = []
    if store.layout == "packed":
        verify(store, progress)
        lists = sorted(store.manifest.get("originals", {}))
        for role in lists:
            originals(store.folder, role)
        files = [*(file_of(store.folder, name).name for name in COLUMNS), *(f"{role}.jsonl" for role in lists)]
    else:
        check_cache(store, progress)
    return {
        "folder": str(store.folder),
        "layout": store.layout,
        "events": store.events,
        "users": store.users,
        "items": store.manifest.get("distinct", {}).get("items", store.items),
        "digest": store.digest,
        "verified_by_digest": sorted(files),
    }
