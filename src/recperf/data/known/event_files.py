"""Opens the events in a folder, whoever wrote them; `recperf data get | prepare | check | info | make` for listening
events.

Shapes: E events, U users, I items, W windows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from ... import locations
from ...errors import DataError, UsageError
from ...folders import one_at_a_time
from .. import datasets
from ..datasets import Dataset
from ..events.item_table import check_files
from ..events.kinds import DAY_S, LIKE, NEGATIVE, POSITIVE
from ..events.store import (
    EVENT_BYTES,
    MANIFEST,
    EventStore,
    file_of,
    is_store_folder,
    open_store,
    originals,
    stored_columns,
    verify,
)
from ..split import record
from ..streaming.config import HistoryConfig, WindowConfig
from ..streaming.windows import NoAnchors, WindowIndex
from .yambda import raw
from .yambda.mlperf_cache import CACHE_META, FLAT_BYTES, READY, open_reference
from .yambda.rows import count_by_type
from .yambda.yambda_like import NAME as SYNTHETIC
from .yambda.yambda_like import YambdaLike, of_size

SHARES = {"listen_plus": POSITIVE, "like": LIKE, "skip": NEGATIVE}
Facts = dict[str, object]
"""What a command prints, line by line or as JSON."""
Say = Callable[[str], None]
Progress = Callable[..., None]
"""Called with the amount done, the total, and for bytes the number of rows in them."""
Bars = Callable[..., Progress]
"""Makes the progress of a labelled piece of work, with the unit it is counted in: events, bytes, share."""


def open_events(path: Path) -> EventStore:
    """Open an event store or a reference cache, whichever the folder contains."""
    path = path.expanduser()
    if is_store_folder(path):
        return open_store(path)
    if (path / READY).exists() or (path / CACHE_META).exists() or path.name.startswith("hstu_cache_L"):
        return open_reference(path)
    caches = sorted(folder for folder in path.glob("hstu_cache_L*") if folder.is_dir())
    if len(caches) == 1:
        return open_reference(caches[0])
    what = (
        f"there are no events here: no {MANIFEST} of an event store, and no {READY} of a reference cache, here or in a "
    )
    what += "folder hstu_cache_L*" + ("" if path.is_dir() else "; the folder does not exist")
    if caches:
        what = f"there are {len(caches)} caches here: {', '.join(folder.name for folder in caches)}"
    raise DataError(what, where={"folder": path}, fix="name one of them" if caches else "recperf data prepare --help")


def store_folder(name: str) -> Path:
    return locations.dataset_folder(name) / "store"


def get(name: str, *, say: Say, bars: bool) -> Facts:
    """Download raw files."""
    from .yambda import download

    return {"name": name, **download.get(name.removeprefix("yambda-"), say=say, bars=bars)}


def prepare(name: str, *, path: Path | None, store: Path | None, progress: Bars) -> Facts:
    """Convert raw files to a store."""
    if name == SYNTHETIC and path is None:
        raise UsageError(f"{SYNTHETIC} is generated as a store", fix=f"recperf data make {SYNTHETIC} --path FOLDER")
    files = path or locations.dataset_folder(name) / "raw"
    if path is None and not files.is_dir():
        raise datasets.missing(name)
    folder, began = (store or store_folder(name)).expanduser(), monotonic()
    existed = (folder / MANIFEST).is_file()
    # Synthetic raw files may have any size.
    located = raw.locate(files, None if name == SYNTHETIC else name.removeprefix("yambda-"))
    raw.prepare(located, folder, name=name, progress=progress("preparing"))
    made = open_store(folder).manifest
    return {
        **_made(name, folder, began),
        "prepared": not existed,
        "split": made.split,
        "store_bytes": sum(column.bytes for column in made.columns.values()),
        "bytes_an_event": EVENT_BYTES,
        "licence": made.licence,
    }


def make(name: str, *, events: int | None, seed: int, path: Path | None, progress: Progress) -> Facts:
    """Write the synthetic dataset as a store, of about so many events."""
    from .yambda import synthesize

    if name != SYNTHETIC:
        what = f"{name} cannot be generated; {SYNTHETIC} and shop can"
        raise UsageError(what, fix="recperf data make --help")
    if path is None:
        raise UsageError(f"{name} is written to a folder", fix=f"recperf data make {name} --path FOLDER")
    began, config = monotonic(), YambdaLike(seed=seed) if events is None else of_size(events, seed=seed)
    folder = synthesize.write_store(config, path, progress=progress)
    return {**_made(name, folder, began), "synthetic": True, "seed": seed}


def _made(name: str, folder: Path, began: float) -> Facts:
    store = open_store(folder)
    counts = {"events": store.events, "users": store.users, "items": store.items}
    seconds = round(monotonic() - began, 2)
    return {"name": name, "folder": str(folder), **counts, "digest": store.digest, "seconds": seconds}


def check(name: str, *, path: Path | None, progress: Bars, say: Say) -> Facts:
    """Compare a dataset, downloaded files and store, with its digests; damage is an error."""
    from .yambda import download

    answer: Facts = {"name": name, "intact": True}
    downloaded = locations.dataset_folder(name) / "raw"
    if path is None and downloaded.is_dir():
        size, bar = name.removeprefix("yambda-"), progress("comparing with the published files", "bytes")
        answer["raw"] = {"folder": str(downloaded), "verified_by_digest": download.verify(size, bar)}
    if path is not None or name == SYNTHETIC or store_folder(name).is_dir() or "raw" not in answer:
        store = find(name, path=path, say=say)
        answer["store"] = check_store(store, progress("checking the store", "share"))
    return answer


def check_store(store: EventStore, progress: Progress) -> Facts:
    """Compare a store with its digests; a reference cache, which has none, is opened.

    `verified_by_digest` names the files that were compared with digests.
    """
    files: list[str] = []
    if store.layout == "packed":
        verify(store, progress)
        lists = sorted(store.originals)
        for role in lists:
            originals(store.folder, role)
        columns = (file_of(store.folder, name).name for name in stored_columns(store.manifest.groups))
        files = [*columns, *(f"{role}.jsonl" for role in lists)]
        files += check_files(store)
        files += [record.FILE] * (record.read(store.folder, store.digest) is not None)
    return {
        "folder": str(store.folder),
        "layout": store.layout,
        "events": store.events,
        "users": store.users,
        "items": store.distinct_items,
        "digest": store.digest,
        "verified_by_digest": sorted(files),
    }


def find(name: str, *, path: Path | None, say: Say) -> EventStore:
    """Open a prepared dataset; yambda-like is generated if it does not exist."""
    return open_events(path) if path is not None else events_of(datasets.find(name), say)


def events_of(dataset: Dataset, say: Say) -> EventStore:
    """The events of a dataset; synthetic ones are generated if they are not there yet."""
    return embedded(say=say) if dataset.folder is None else open_events(dataset.folder)


def embedded(*, say: Say, config: YambdaLike | None = None) -> EventStore:
    """Open the synthetic dataset in the cache folder; generate it if it does not exist."""
    from .yambda import synthesize

    config = config or YambdaLike()
    folder = locations.dataset_folder(SYNTHETIC) / synthesize.folder_name(config)
    if not (folder / MANIFEST).is_file():
        waiting = partial(say, f"another process generates {SYNTHETIC}: waiting for it")
        with one_at_a_time(folder.with_name(folder.name + ".lock"), waiting):
            if not (folder / MANIFEST).is_file():
                say(f"generating {SYNTHETIC} once, in {folder}")
                synthesize.write_store(config, folder)
    return open_store(folder)


def describe(store: EventStore, *, seconds: int, min_history: int | None) -> Facts:
    """Everything that `data info` prints of such events. Without a minimum of histories it is that of the benchmark, or
    100 if fewer than a tenth of the users have that many events."""
    lengths_U = np.diff(store.user_first_U1)
    if min_history is None:
        full = HistoryConfig().length
        min_history = full if int((lengths_U > full).sum()) * 10 >= store.users else 100
    windows = WindowConfig(seconds=seconds, min_history=min_history)
    # Events are sorted by time, so that only the first and last of each user are read.
    first = int(store.times_E[store.user_first_U1[:-1]].min())
    last = int(store.times_E[store.user_first_U1[1:] - 1].max())
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
        "artists": int(np.count_nonzero(np.unique(store.groups_IG[:, 0]))),
        "albums": int(np.count_nonzero(np.unique(store.groups_IG[:, 1]))),
        "events": store.events,
        # Of a reference cache without its files of anchors.
        "bytes_an_event": EVENT_BYTES if store.layout == "packed" else FLAT_BYTES,
        "days": round((last - first) / DAY_S, 2),
        "first_time": first,
        "last_time": last,
        "by_type": count_by_type(by_kind) if (by_kind := store.manifest.by_kind) else {},
        "shares": {name: store.manifest.count(bit) / store.events for name, bit in SHARES.items()} if by_kind else {},
        "events_per_user": _spread(lengths_U),
        "windows": {
            "seconds": windows.seconds,
            "count": index.windows if index else 0,
            "first_anchor": index.t_min if index else None,
            "last_anchor": index.t_max if index else None,
        },
        "anchors": {
            "min_history": windows.min_history,
            "total": int(anchors_W.sum()),
            "in_the_last_window": int(anchors_W[-1]) if len(anchors_W) else 0,
            "a_window": _spread(anchors_W) if len(anchors_W) else None,
            "users_with_enough": int((lengths_U > windows.min_history).sum()),
        },
    }


def _spread(counts: NDArray[np.int64]) -> dict[str, float]:
    p20, p50, p80 = (float(value) for value in np.percentile(counts, [20, 50, 80]))
    return {"p20": p20, "p50": p50, "p80": p80, "mean": float(counts.mean()), "max": float(counts.max())}
