"""`recperf data prepare | check | info | make | import` for listening events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Literal, Protocol

import numpy as np
from msgspec.structs import asdict

from ... import places
from ...errors import DataError, UsageError
from ...folders import one_at_a_time
from . import item_features, raw
from .import_options import ImportOptions
from .manifest import ImportFacts
from .reference import CACHE_META, READY, open_events
from .schema import EVENT_TYPES, EVENTS_FILE, LICENCE
from .store import (
    COLUMNS,
    EVENT_BYTES,
    MANIFEST,
    EventStore,
    file_of,
    is_store_folder,
    open_store,
    originals,
    verify,
)
from .yambda_like import YambdaLike

Facts = dict[str, object]
"""What a command prints, line by line or as JSON."""
Say = Callable[[str], None]
Progress = Callable[..., None]
"""Called with the amount done, the total, and for bytes the number of rows in them."""
Unit = Literal["events", "bytes", "share"]
SYNTHETIC = "yambda-like"


class Bars(Protocol):
    def __call__(self, label: str, unit: Unit = "events") -> Progress: ...


def size_of(name: str) -> str:
    """The size in the name of a real dataset."""
    return name.removeprefix("yambda-")


def store_folder(name: str) -> Path:
    return places.dataset_folder(name) / "store"


def prepare(
    name: str,
    *,
    path: Path | None,
    store: Path | None,
    progress: Bars,
    say: Say,
) -> Facts:
    """Convert raw files to a store."""
    from .prepare import prepare as build

    if name == SYNTHETIC and path is None:
        raise UsageError(f"{SYNTHETIC} is generated as a store", fix=f"recperf data make {SYNTHETIC} --path FOLDER")
    files = raw.locate(path or _downloaded(name), _size_in(name))
    folder, began = (store or store_folder(name)).expanduser(), monotonic()
    existed = (folder / MANIFEST).is_file()
    build(files, folder, name=name, progress=progress("preparing"), say=say)
    seconds = monotonic() - began
    made = open_store(folder)
    return {
        "name": name,
        "folder": str(folder),
        "prepared": not existed,
        "events": made.events,
        "users": made.users,
        "items": made.items,
        "split": made.manifest.split,
        "store_bytes": sum(column.bytes for column in made.manifest.columns.values()),
        "bytes_an_event": EVENT_BYTES,
        "digest": made.digest,
        "licence": made.manifest.licence,
        "seconds": round(seconds, 2),
    }


def check(name: str, *, path: Path | None, progress: Bars, say: Say) -> Facts:
    """Read a whole dataset, raw files and store; damage is an error. Files without digests are listed."""
    answer: Facts = {"name": name, "intact": True}
    if name == SYNTHETIC and path is None:
        return answer | {"store": check_store(embedded(say=say), progress("checking the store", "share"))}
    places_by_kind = _places(name, path)
    if not places_by_kind:
        raise _missing(name, path)
    for kind, place in places_by_kind.items():
        if kind == "raw":
            files = raw.locate(place, _size_in(name))
            digests = _digests(name, files, progress if path is None else None)
            answer["raw"] = check_raw(files, progress("checking raw files")) | digests
        else:
            answer["store"] = check_store(open_events(place), progress("checking the store", "share"))
    return answer


def check_raw(files: raw.RawFiles, progress: Progress) -> Facts:
    """Check schema, values and order of raw files."""
    items = len(raw.catalogue(files.artists, files.albums))
    events = raw.RawEvents(files.events, items)
    by_type = np.zeros(len(EVENT_TYPES), np.int64)
    users, last_user, largest = 0, -1, -1
    for chunk in events.chunks():
        by_type += np.bincount(chunk.types, minlength=len(EVENT_TYPES))
        users += int(np.count_nonzero(np.diff(chunk.uids.astype(np.int64), prepend=last_user)))
        last_user = int(chunk.uids[-1])
        largest = max(largest, int(chunk.items.max()))
        progress(chunk.first_row + len(chunk), events.rows)
    first, last = events.time_range()
    return {
        "file": str(files.events),
        "events": events.rows,
        "users": users,
        "items": items,
        "largest_item": largest,
        "first_time": first,
        "last_time": last,
        "by_type": dict(zip(EVENT_TYPES, map(int, by_type))),
        "footer_sha256": raw.identity_of(files.events)["sha256"],
    }


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
        files = [*(file_of(store.folder, name).name for name in COLUMNS), *(f"{role}.jsonl" for role in lists)]
        files += [item_features.FILE] * (item_features.read_items(store) is not None)
    return {
        "folder": str(store.folder),
        "layout": store.layout,
        "events": store.events,
        "users": store.users,
        "items": store.distinct_items,
        "digest": store.digest,
        "verified_by_digest": sorted(files),
    }


def _digests(name: str, files: raw.RawFiles, progress: Bars | None) -> Facts:
    """Raw files that are the published ones by their digests, and those without digests."""
    from . import download

    if progress is None:
        return {
            "verified_by_digest": [],
            "not_verified_by_digest": [f.name for f in (files.events, files.artists, files.albums)],
        }
    verified, unverified = download.verify(size_of(name), progress("comparing with the published files", "bytes"))
    return {"verified_by_digest": verified, "not_verified_by_digest": unverified}


def find(name: str, *, path: Path | None, say: Say) -> EventStore:
    """Open a prepared dataset; yambda-like is generated if it does not exist."""
    if name == SYNTHETIC and path is None:
        return embedded(say=say)
    there = _places(name, path)
    if "store" in there:
        return open_events(there["store"])
    if "raw" in there and (path or (there["raw"] / "flat" / size_of(name) / EVENTS_FILE).is_file()):
        where = f" --path {path}" if path else ""
        raise DataError(
            f"{name} is downloaded but not prepared",
            where={"folder": there["raw"]},
            fix=f"recperf data prepare {name}{where}",
        )
    raise _missing(name, path)


def embedded(*, say: Say, config: YambdaLike | None = None) -> EventStore:
    """Open the synthetic dataset in the cache folder; generate it if it does not exist."""
    from . import synthesize

    config = config or YambdaLike()
    folder = places.dataset_folder(SYNTHETIC) / synthesize.folder_name(config)
    if not (folder / MANIFEST).is_file():
        waiting = partial(say, f"another process generates {SYNTHETIC}: waiting for it")
        with one_at_a_time(folder.with_name(folder.name + ".lock"), waiting):
            if not (folder / MANIFEST).is_file():
                say(f"generating {SYNTHETIC} once, in {folder}")
                synthesize.write_store(config, folder)
    return open_store(folder)


def make(config: YambdaLike, *, path: Path, progress: Progress) -> Facts:
    """Write the synthetic dataset as a store."""
    from . import synthesize

    folder, began = path.expanduser(), monotonic()
    synthesize.write_store(config, folder, progress=progress)
    store, seconds = open_store(folder), monotonic() - began
    return {
        "name": SYNTHETIC,
        "folder": str(folder),
        "synthetic": True,
        "seed": config.seed,
        "events": store.events,
        "users": store.users,
        "items": store.items,
        "digest": store.digest,
        "seconds": round(seconds, 2),
    }


class EventImport(ImportFacts, kw_only=True):
    """A finished import of a user's events."""

    name: str
    folder: str
    imported: bool
    """False: the store was there already."""
    licence: str
    synthetic: bool
    events: int
    users: int
    items: int
    artists: int | None = None
    albums: int | None = None
    first_time: int
    last_time: int
    largest_item: int
    by_type: dict[str, int]
    by_pool: dict[str, int]
    labelled: int
    """Events that a model can be trained on: listens in the file, and drawn negatives."""
    positive_share: float | None
    items_without: dict[str, int]
    """The number of items without an artist or album, where the file has them."""
    held_out: int
    store_bytes: int
    digest: str
    notes: list[str]
    seconds: float
    next: str = ""
    """The command that trains on it."""


def import_events(options: ImportOptions, *, store: Path | None, progress: Bars) -> EventImport:
    """Import events from a file of the user as a store."""
    from .imports import HELD_OUT
    from .imports import import_events as build

    folder, began = (store or store_folder(options.name)).expanduser(), monotonic()
    existed = (folder / MANIFEST).is_file()
    build(options, folder, reading=progress("reading", "bytes"), sorting=progress("sorting"))
    made = open_store(folder)
    seconds = monotonic() - began
    manifest, facts = made.manifest, made.imported
    assert facts is not None
    labelled = manifest.by_type["listen"] + (facts.negatives.drawn if facts.negatives else 0)
    return EventImport(
        **(asdict(facts) | facts.distinct),
        name=options.name,
        folder=str(folder),
        imported=not existed,
        licence=manifest.licence,
        synthetic=manifest.synthetic,
        events=manifest.events,
        first_time=manifest.first_time,
        last_time=manifest.last_time,
        largest_item=manifest.largest_item,
        by_type=manifest.by_type,
        by_pool=manifest.by_pool,
        labelled=labelled,
        positive_share=manifest.by_pool["listen_plus"] / labelled if labelled else None,
        items_without={
            role: facts.distinct["items"] - int((made.catalogue_I2[:, at] != 0).sum())
            for at, role in enumerate(("artists", "albums"))
            if role in facts.distinct
        },
        held_out=round(HELD_OUT * labelled),
        store_bytes=sum(column.bytes for column in manifest.columns.values()),
        digest=made.digest,
        notes=list(_notes(facts)),
        seconds=round(seconds, 2),
    )


def _notes(facts: ImportFacts) -> Iterator[str]:
    """What a user should know about an import, one sentence each."""
    if facts.distinct["users"] == 1:
        yield "all rows have the same user: check --user"
    if facts.time_order == "random order":
        yield "the file has no time: events are in random order, and a random fifth is held out; or: --order rows"
    elif facts.options.sequences:
        yield "the file has no time: only the order of each user's items is known, and their last items are held out"
    elif facts.time_order == "order of the file":
        yield "the file has no time: the order of its rows is used, and its last fifth is held out"
    elif facts.days and date.fromisoformat(facts.days.last) > datetime.now(UTC).date():
        yield f"the last event is in the future, {facts.days.last}: check --time and --time-unit"
    if file := facts.item_file:
        if file.without:
            yield f"{file.without:,} of {facts.distinct['items']:,} items are not in {file.source}"
        yield from (f"column {name} of {file.source} is not used: {why}" for name, why in file.left_out.items())
    share, drawn = facts.positive_share_in_file, facts.negatives
    if drawn:
        yield (
            f"the file has no label: every row is positive, with {drawn.per_event} negatives drawn for each "
            f"({drawn.by}, seed {drawn.seed}), none of them an item of the same user"
        )
        if drawn.left_out:
            yield f"{drawn.left_out:,} negatives could not be drawn: their users have every item"
    elif share in (0.0, 1.0):
        which = "positive" if share else "negative"
        yield f"all rows are {which}: check --positive-from, or draw negatives with --negatives 4 and without a label"


def _size_in(name: str) -> str | None:
    """The size to look for among raw files; synthetic ones may have any."""
    return None if name == SYNTHETIC else size_of(name)


def _places(name: str, path: Path | None) -> dict[str, Path]:
    """The folders of a dataset: `raw` and `store`, as far as they exist."""
    if path is None:
        folders = {"raw": places.dataset_folder(name) / "raw", "store": store_folder(name)}
        return {kind: folder for kind, folder in folders.items() if folder.is_dir()}
    # Absolute, so that the current folder has a name too.
    path = path.expanduser().absolute()
    if not path.exists():
        raise DataError("the path does not exist", where={"path": path}, fix="check --path")
    if _looks_like_a_store(path):
        return {"store": path}
    raw.locate(path, _size_in(name))
    return {"raw": path}


def _looks_like_a_store(path: Path) -> bool:
    """Whether a folder is, or was meant to become, a store or a cache of the reference."""
    if not path.is_dir():
        return False
    is_cache = path.name.startswith(("processed_", "hstu_cache_L")) or (path / READY).exists()
    return is_cache or (path / CACHE_META).exists() or is_store_folder(path)


def _downloaded(name: str) -> Path:
    folder = places.dataset_folder(name) / "raw"
    if not folder.is_dir():
        raise _missing(name, None)
    return folder


def _missing(name: str, path: Path | None) -> DataError:
    return DataError(
        f"{name} is not on this machine",
        where={"folder": path or places.dataset_folder(name)},
        fix=f"recperf data get {name} ({LICENCE}), or name a folder with --path",
    )
