"""Statistics of an event store: counts, shares, lengths, windows and anchors, in bounded memory.

Shapes: E events, U users, I items, W windows.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ...jsonfile import as_json
from .config import HistoryConfig, WindowConfig
from .reference import FLAT_COLUMNS
from .schema import DAY_S, DRAWN, EVENT_TYPES, LIKE, LISTEN_PLUS, ORGANIC, SKIP, TYPE_SHIFT
from .store import EVENT_BYTES, EventStore
from .windows import NoAnchors, WindowIndex

_STRIDE = 1 << 22
_FLAT_BYTES = sum(np.dtype(kind).itemsize for kind in FLAT_COLUMNS.values())
"""Columns of the reference's cache, without its files of anchors."""
ROLES = ("user", "item", "time", "rating", "ratio", "label", "genres", "artist", "album", "type")


def usual_history(store: EventStore) -> int:
    """The default history length: the benchmark's, or 100 if fewer than a tenth of the users have so many events."""
    full = HistoryConfig().length
    enough = int((np.diff(store.user_first_U1) > full).sum())
    return full if enough * 10 >= store.users else 100


def describe(store: EventStore, windows: WindowConfig) -> dict[str, object]:
    """Everything that `data info` prints."""
    events_I, by_kind = _tallies(store)
    lengths_U = np.diff(store.user_first_U1)
    seen = np.sort(events_I[events_I > 0])[::-1]
    first, last = _time_range(store)
    kinds = np.arange(256)
    types = {name: int(by_kind[kinds >> TYPE_SHIFT == index].sum()) for index, name in enumerate(EVENT_TYPES)}
    pools = {"listen_plus": LISTEN_PLUS, "skip": SKIP, "like": LIKE}
    shares = {name: float(by_kind[(kinds & bit) > 0].sum() / store.events) for name, bit in pools.items()}
    drawn_share = float(by_kind[(kinds & DRAWN) > 0].sum() / store.events)
    drawn = {"drawn": drawn_share} if drawn_share else {}
    # A store too small for any anchor has no windows but can be described.
    index = None
    with suppress(NoAnchors):
        index = WindowIndex.open(store, windows)
    anchors_W = index.counts() if index else np.zeros(0, np.int64)
    return {
        "name": store.name,
        "synthetic": store.synthetic,
        "layout": store.layout,
        "folder": str(store.folder),
        "licence": store.manifest.licence,
        "digest": store.digest,
        "users": store.users,
        "items": store.distinct_items,
        "items_with_events": len(seen),
        "artists": _distinct(store.catalogue_I2[:, 0]),
        "albums": _distinct(store.catalogue_I2[:, 1]),
        "events": store.events,
        "bytes_an_event": EVENT_BYTES if store.layout == "packed" else _FLAT_BYTES,
        "days": round((last - first) / DAY_S, 2),
        "first_time": first,
        "last_time": last,
        **_imported(store),
        "by_type": types,
        "shares": {**shares, **drawn, "other": 1.0 - sum(shares.values()) - sum(drawn.values())},
        "organic_share": float(by_kind[(kinds & ORGANIC) > 0].sum() / store.events),
        "events_per_user": _spread(lengths_U),
        "events_per_item": _spread(seen),
        "top_items_share": float(seen[: max(1, len(seen) // 100)].sum() / store.events),
        "windows": _windows(index, windows.seconds),
        "anchors": {
            "min_history": windows.min_history,
            "total": int(anchors_W.sum()),
            "in_the_last_window": int(anchors_W[-1]) if len(anchors_W) else 0,
            "a_window": _spread(anchors_W) if len(anchors_W) else None,
            "users_with_enough": int((lengths_U > windows.min_history).sum()),
        },
    }


def _windows(index: WindowIndex | None, seconds: int) -> dict[str, int | None]:
    return {
        "seconds": seconds,
        "count": index.windows if index else 0,
        "first_anchor": index.t_min if index else None,
        "last_anchor": index.t_max if index else None,
    }


def _imported(store: EventStore) -> dict[str, object]:
    """What an import recorded about its file: days, columns, negatives."""
    facts = store.imported
    if facts is None:
        return {}
    days = {"days_of_events": f"{facts.days.first} to {facts.days.last}"} if facts.days else {}
    columns = {role: getattr(facts.options, role) for role in ROLES if getattr(facts.options, role) is not None}
    names = ("time_order", "events_in_file", "density", "negatives", "unused_columns", "skipped_rows")
    others = {name: value for name, value in as_json(facts).items() if name in names and value}
    return {**days, "columns": columns, **others}


def _tallies(store: EventStore) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number of events of each item and kind, in one pass."""
    events_I, by_kind = np.zeros(store.items, np.int64), np.zeros(256, np.int64)
    for start in range(0, store.events, _STRIDE):
        part = slice(start, min(store.events, start + _STRIDE))
        events_I += np.bincount(store.items_at(part), minlength=store.items)
        by_kind += np.bincount(store.kinds(part), minlength=256)
    return events_I, by_kind


def _time_range(store: EventStore) -> tuple[int, int]:
    """First and last time. Events are sorted by time, so that only the first and last of each user are read."""
    first_U, last_U = store.user_first_U1[:-1], store.user_first_U1[1:] - 1
    return int(store.times_E[first_U].min()), int(store.times_E[last_U].max())


def _distinct(ids_I: NDArray[np.uint32]) -> int:
    return int(np.count_nonzero(np.unique(ids_I)))


def _spread(counts: NDArray[np.int64]) -> dict[str, float]:
    p20, p50, p80 = (float(value) for value in np.percentile(counts, [20, 50, 80]))
    return {"p20": p20, "p50": p50, "p80": p80, "mean": float(counts.mean()), "max": float(counts.max())}
