"""What dlrm-v4 makes of a user's own events: two groups of each item in place of artist and album, and sizes of
histories, windows and tables.

Shapes: I items.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...data.events.item_table import ItemColumn, columns_of
from ...data.events.kinds import LIKE, NEGATIVE, POSITIVE
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


@dataclass(frozen=True, eq=False)
class ItemGroups:
    """Two groups of every item, as numbers from 1 on; 0 where unknown. Group k + 1 is `names[k]`."""

    columns: tuple[str, str]
    """The columns of the items that they come from, by the user's names."""
    names: tuple[list[str], list[str]]
    numbers_I2: NDArray[np.uint32]


def groups(store: EventStore) -> ItemGroups | None:
    """The first value of the first column of items with categories, and all values of the last one, as a set; None
    where items have no such column."""
    columns = {name: one for name, one in columns_of(store).items() if one.kind in ("category", "categories")}
    if not columns:
        return None
    (first, *_), (*_, last) = columns, columns
    one, every = _grouped(columns[first], whole=False), _grouped(columns[last], whole=True)
    return ItemGroups((first, last), (one[0], every[0]), np.stack([one[1], every[1]], 1).astype(np.uint32))


def _grouped(column: ItemColumn, *, whole: bool) -> tuple[list[str], NDArray[np.int64]]:
    """The names of the groups and the number of every item's, by its first value or by all of them."""
    names, counts_I, values_V = column.categories()
    ends_I = np.cumsum(counts_I)
    of_items = [values_V[end - count : end].tolist() for end, count in zip(ends_I.tolist(), counts_I.tolist())]
    keys = ["|".join(names[value] for value in sorted({*(one if whole else one[:1])})) for one in of_items]
    distinct, numbers_I = np.unique(np.array(keys, str), return_inverse=True)
    # Items without a value have the empty text, which comes first.
    without = int(distinct[0] == "")
    return distinct[without:].tolist(), numbers_I + 1 - without


def with_groups(store: EventStore) -> EventStore:
    """The store with two groups of every item."""
    if store.groups_IG.shape[1] == 2:
        return store
    own = groups(store)
    return replace(store, groups_IG=np.zeros((store.items, 2), np.uint32) if own is None else own.numbers_I2)


def group_names(store: EventStore) -> dict[str, list[str]]:
    """The names of both groups, by role, of items that have some."""
    own = groups(store)
    return {} if own is None else {"first group": own.names[0], "second group": own.names[1]}


def history(store: EventStore) -> HistoryConfig:
    """A history as long as those of most users. It takes events of any kind, unless the store has all three kinds of
    actions: interleaved would leave the places of a missing kind empty."""
    usual = int(np.percentile(np.diff(store.user_first_U1), 80)) // store.stored_per_event
    length = min(LONGEST, max(SHORTEST, usual // 3 * 3))
    interleaved = all(_any(store, action) for action in (POSITIVE, LIKE, NEGATIVE))
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
    """A row for every item and group of items. Users and crosses have a row for every combination where the data has
    many events of each, otherwise one that all share: what few events say about a user is in the history and the
    running rates, and rows of their own would memorise outcomes."""
    artists, albums = (int(ids.max(initial=0)) + 1 for ids in with_groups(store).groups_IG.T)
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
