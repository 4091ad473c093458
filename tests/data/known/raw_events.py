"""Raw files of listening events, written from arrays, and the MLPerf reference's cache of a store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recperf.data.events.kinds import POSITIVE
from recperf.data.events.store import EventStore
from recperf.data.known.yambda.raw import RawFiles
from recperf.data.known.yambda.rows import EVENT_TYPES, TYPE_SHIFT
from recperf.data.known.yambda.schema import ALBUMS_FILE, ARTISTS_FILE, EVENTS_FILE
from recperf.data.streaming.features import ORGANIC

Events = dict[str, NDArray[Any]]


def write_cache(root: Path, files: RawFiles, store: EventStore) -> Path:
    """Write the MLPerf reference's cache of a packed store."""
    cache, maps = root / f"processed_{files.size}" / "hstu_cache_L9", root / "shared_metadata"
    cache.mkdir(parents=True)
    maps.mkdir()
    for path in (files.artists, files.albums):
        shutil.copy(path, maps)
    kinds_E, users_E = store.kinds(slice(None)), store.users_of(np.arange(store.events))
    start, end = (np.full(int(store.user_ids_U[-1]) + 1, -1) for _ in range(2))
    start[store.user_ids_U], end[store.user_ids_U] = store.user_first_U1[:-1], store.user_first_U1[1:]
    columns = {
        "flat_uid": store.user_ids_U[users_E],
        "flat_item_ids": store.items_E[:].astype(np.int64),
        "flat_timestamps": store.times_E[:].astype(np.int64),
        "flat_event_types": (kinds_E >> TYPE_SHIFT).astype(np.int64),
        "flat_played_ratio": np.where(kinds_E & POSITIVE, 80, 20).astype(np.float32),
        "flat_is_organic": (kinds_E & ORGANIC > 0).astype(np.int8),
        **{f"flat_is_{name}": kinds_E & bit > 0 for name, bit in (("listen_plus", 1), ("like", 2), ("skip", 4))},
        "unique_uids": store.user_ids_U,
        "user_start": start,
        "user_end": end,
    }
    for name, column in columns.items():
        np.save(cache / f"{name}.npy", column)
    (cache / "store_meta.json").write_text(json.dumps({"num_users": store.users, "total_events": store.events}))
    (cache / "_READY").touch()
    return cache


def make_events(
    seed: int = 0, users: int = 20, events: int = 1000, items: int = 50, days: int = 320, tick: int = 5
) -> Events:
    """A synthetic stream in Yambda's order: uids, items, times, types (codes), organic, ratios and lengths.

    The last two are -1 for null. Users start at 1 and some ids are left out; many events share a tick.
    """
    draw = np.random.default_rng(seed)
    ids = np.sort(draw.choice(np.arange(1, 2 * users + 1), users, replace=False))
    uids = np.sort(np.concatenate([ids, draw.choice(ids, max(0, events - users))]))[:events]
    # Half of the times are drawn from few values, so that ties are common.
    ticks = days * 86_400 // tick
    few = draw.integers(0, ticks, max(1, events // 20))
    times = np.where(draw.random(events) < 0.5, draw.choice(few, events), draw.integers(0, ticks, events))
    order = np.lexsort((times, uids))
    types = draw.choice(len(EVENT_TYPES), events, p=(0.85, 0.08, 0.03, 0.02, 0.02))
    listen = types == 0
    return {
        "uids": uids.astype(np.uint32),
        "items": draw.integers(1, items + 1, events).astype(np.uint32),
        "times": (times[order] * tick).astype(np.uint32),
        "types": types.astype(np.uint8),
        "organic": draw.integers(0, 2, events).astype(np.uint8),
        "ratios": np.where(listen, draw.integers(0, 120, events), -1).astype(np.int32),
        "lengths": np.where(listen, draw.integers(30, 400, events), -1).astype(np.int64),
    }


def write_raw(
    folder: Path,
    events: Events,
    *,
    size: str = "50m",
    catalogue_I2: NDArray[Any] | None = None,
    layout: str = "hub",
    columns: dict[str, Any] | None = None,
    **how: Any,
) -> Path:
    """Write raw files in a layout: hub (`flat/<size>/`), raw (`raw/<size>/`, `shared_metadata/`) or plain (one folder).

    `catalogue_I2` holds artist and album of every item, 0 for no row; `columns` replace those of the event file.
    """
    if catalogue_I2 is None:
        items = int(events["items"].max(initial=1)) + 1
        catalogue_I2 = np.stack([np.arange(items) % 17, np.arange(items) % 29], axis=1)
        catalogue_I2[-1] = (3, 4)
    table: dict[str, Any] = {
        "uid": pa.array(events["uids"], pa.uint32()),
        "timestamp": pa.array(events["times"], pa.uint32()),
        "item_id": pa.array(events["items"], pa.uint32()),
        "is_organic": pa.array(events["organic"], pa.uint8()),
        "played_ratio_pct": pa.array(events["ratios"], pa.uint16(), mask=events["ratios"] < 0, safe=False),
        "track_length_seconds": pa.array(events["lengths"], pa.uint32(), mask=events["lengths"] < 0, safe=False),
        "event_type": pa.array([EVENT_TYPES[code] for code in events["types"]], pa.string()),
    }
    table |= columns or {}
    below, beside = {
        "hub": (folder / "flat" / size, folder),
        "raw": (folder / "raw" / size, folder / "shared_metadata"),
        "plain": (folder, folder),
    }[layout]
    below.mkdir(parents=True, exist_ok=True)
    beside.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), below / EVENTS_FILE, **how)
    for name, file, values in (
        ("artist_id", ARTISTS_FILE, catalogue_I2[:, 0]),
        ("album_id", ALBUMS_FILE, catalogue_I2[:, 1]),
    ):
        known = np.flatnonzero(values)
        pairs = {name: pa.array(values[known], pa.uint32()), "item_id": pa.array(known, pa.uint32())}
        pq.write_table(pa.table(pairs), beside / file)
    return folder
