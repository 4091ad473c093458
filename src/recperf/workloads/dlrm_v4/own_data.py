"""Sizes of dlrm-v4 that follow from a user's own events: histories, windows and tables."""

from __future__ import annotations

import numpy as np

from ...data.events.kinds import LIKE, LISTEN_PLUS, SKIP
from ...data.events.store import EventStore
from ...data.streaming.config import HistoryConfig, Strategy, WindowConfig
from ...data.streaming.features import CROSSES
from ...data.streaming.rates import BYTES_AN_EVENT
from ...errors import notice_once
from ...machine import available_bytes
from ...models.dlrm_v4.config import DLRMv4Config

WINDOWS = 100
"""Windows that the time span is divided into."""
SHORTEST, LONGEST = 12, 24
"""Bounds on the events of a history."""
RECENT = 3
"""Last events that the user's vector is computed from directly."""
DROPOUT, WEIGHT_DECAY = 0.1, 0.01
SAMPLES, MOST_EPOCHS = 700_000, 12
"""Samples to train on in all epochs together, and the most epochs: a small log is read more often."""
EVENTS_A_ROW = 200
"""A context feature has rows of its own where each has this many events on average; fewer would be memorised."""
MEMORY_SHARE = 0.25
"""Share of the free memory that running rates may use."""
_STRIDE = 1 << 24


def history(store: EventStore) -> HistoryConfig:
    """A history as long as those of most users. It takes events of any kind, unless the store has all three kinds of
    actions: interleaved would leave the places of a missing kind empty."""
    usual = int(np.percentile(np.diff(store.user_first_U1), 80)) // store.stored_per_event
    length = min(LONGEST, max(SHORTEST, usual // 3 * 3))
    interleaved = all(_any(store, action) for action in (LISTEN_PLUS, LIKE, SKIP))
    scan = max(400, 4 * length * store.stored_per_event)
    strategy: Strategy = "interleaved" if interleaved else "last-n"
    return HistoryConfig(length=length, scan=scan, strategy=strategy, query_time="candidate")


def _any(store: EventStore, action: int) -> bool:
    """Whether some event is this action."""
    parts = (slice(start, start + _STRIDE) for start in range(0, store.events, _STRIDE))
    return any((store.kinds(part) & np.uint8(action)).any() for part in parts)


def windows(store: EventStore) -> WindowConfig:
    """Every listen is an anchor, also a user's first."""
    first, last = store.times_E[store.user_first_U1[:-1]], store.times_E[store.user_first_U1[1:] - 1]
    span = int(last.max()) - int(first.min()) + 1
    return WindowConfig(seconds=max(1, -(-span // WINDOWS)), min_history=0, shuffle=1.0)


def epochs(store: EventStore) -> int:
    """Passes over the training windows; which of them is best, validation decides."""
    return min(MOST_EPOCHS, max(2, round(SAMPLES / max(1, store.events))))


def rates_fit(store: EventStore) -> bool:
    """Whether memory holds running rates of this store."""
    fit = store.events * BYTES_AN_EVENT < MEMORY_SHARE * available_bytes()
    if not fit:
        notice_once(f"no running rates for the model and its baselines: {store.events:,} events need too much memory")
    return fit


def rows(store: EventStore, model: DLRMv4Config) -> tuple[int, ...]:
    """A row for every item, artist and album. Users and crosses have a row for every combination where the data has
    many events of each, otherwise one that all share: what few events say about a user is in the history and the
    running rates, and rows of their own would memorise outcomes."""
    artists, albums = (int(ids.max(initial=0)) + 1 for ids in store.catalogue_I2.T)
    users = int(store.user_ids_U.max(initial=0)) + 1
    counts = {"uid": store.users, "item": store.items, "artist": artists, "album": albums, "hour": 24, "organic": 2}
    combinations = {name: float(np.prod([counts[part] for part in parts])) for name, (parts, _) in CROSSES.items()}
    context = {"uid": float(users), **combinations}
    most = store.events / EVENTS_A_ROW
    ids = {"item_id": store.items, "artist_id": artists, "album_id": albums}
    return tuple(
        {**ids, **{name: int(rows) if rows <= most else 1 for name, rows in context.items()}}[name]
        for name in model.tables
    )
