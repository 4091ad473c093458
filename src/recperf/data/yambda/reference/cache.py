"""Opens the flat-event cache of the MLPerf reference; nothing is copied or converted.

Shapes: E events, U users, I items of the catalogue.

The reference has one .npy file per column, 40 bytes per event, in `<root>/processed_<size>/hstu_cache_L<length>/`, and
the catalogue as two maps in `<root>/shared_metadata/`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import DataError, MachineError, notice_once
from ....jsonfile import load
from ...blocks import Blocks, Column
from ..maps import catalogue
from ..schema import ALBUMS_FILE, ARTISTS_FILE, LICENCE
from ..store import DIGEST_BLOCK, MANIFEST, EventStore, is_store_folder, map_file, open_store

READY, CACHE_META = "_READY", "store_meta.json"
POPULARITY, SPLIT_META = "item_popularity.npy", "split_meta.json"
SHARED_MAPS = "shared_metadata"
RECORD = ".recperf.json"
"""Written by recperf next to the reference's files: which of them are finished, and their source."""

FLAT_COLUMNS = {
    "flat_uid": "<i8",
    "flat_item_ids": "<i8",
    "flat_timestamps": "<i8",
    "flat_event_types": "<i8",
    "flat_played_ratio": "<f4",
    "flat_is_organic": "|i1",
    "flat_is_listen_plus": "|b1",
    "flat_is_like": "|b1",
    "flat_is_skip": "|b1",
}
USER_COLUMNS = {"unique_uids": "<i8", "user_start": "<i8", "user_end": "<i8"}

_FIX = "build the cache again, or fetch this file from where the cache came from"
_STRIDE = 1 << 22
_PIECE, _PIECES = 4096, 8
_CHECKED_USERS = 1024


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
    if caches:
        raise DataError(
            f"there are {len(caches)} caches here: {', '.join(folder.name for folder in caches)}",
            where={"folder": path},
            fix="name one of them",
        )
    raise DataError(
        f"there are no events here: no {MANIFEST} of an event store, and no {READY} of a reference cache, here or in a "
        "folder hstu_cache_L*" + ("" if path.is_dir() else "; the folder does not exist"),
        where={"folder": path},
        fix="recperf data prepare --help",
    )


def open_reference(cache_folder: Path, maps: Path | None = None) -> EventStore:
    """Open a complete cache of the reference. `maps` is the folder of the two maps if it is not the default one.

    The digest identifies a cache by its sizes and a sample of its bytes. Only columns that recperf wrote have digests
    of their own, by which they are verified as they are read.
    """
    folder = cache_folder.expanduser()
    events, users = _counts(folder)
    recorded = read_json(folder.absolute().parent / RECORD).get("files")
    flat = {name: _flat(folder, name, events, recorded) for name in FLAT_COLUMNS}
    if any(values.blocks is None for values in flat.values()):
        notice_once(
            f"{folder} has no digests, since recperf did not write it: training does not notice damage; recperf data "
            "prepare makes a store with digests from the raw events"
        )
    for path in sorted([*folder.glob("positions_L*.npy"), *folder.glob("anchor_ts_L*.npy")]):
        map_npy(path, "<i8")
    user_ids_U, user_first_U1 = _users(folder, flat["flat_uid"], users)
    catalogue_I2 = _catalogue(folder, maps, flat["flat_item_ids"])
    return EventStore(
        folder=folder,
        layout="reference",
        user_ids_U=user_ids_U,
        user_first_U1=user_first_U1,
        items_E=flat["flat_item_ids"],
        times_E=flat["flat_timestamps"],
        catalogue_I2=catalogue_I2,
        flags=(flat["flat_is_listen_plus"], flat["flat_is_like"], flat["flat_is_skip"], flat["flat_is_organic"]),
        types_E=flat["flat_event_types"],
        manifest=_described(folder, events, users),
    )


def _flat(folder: Path, name: str, events: int, recorded: Any) -> Column:
    """A column of events, verified as it is read if recperf wrote it: then its digests are in the record."""
    values, path = column(folder, name, FLAT_COLUMNS[name], events), folder / f"{name}.npy"
    entry = recorded.get(f"{folder.name}/{path.name}") if isinstance(recorded, dict) else None
    if entry is None:
        return Column(values)
    try:
        digests = [str(digest) for digest in entry["blocks"]]
    except (KeyError, TypeError):
        raise unusable(folder.parent / RECORD, f"has no checksums of {path.name}") from None
    content = map_file(path, "|u1")
    blocks = Blocks(path, content, digests, block=DIGEST_BLOCK, damaged=unusable)
    return Column(values, blocks, offset=content.nbytes - values.nbytes)


def reference_ratios(store: EventStore) -> NDArray[np.float32]:
    """Played ratios of a reference cache in percent, 0 for null."""
    return column(store.folder, "flat_played_ratio", FLAT_COLUMNS["flat_played_ratio"], store.events)


def unusable(path: Path, reason: str) -> DataError:
    """The error for a file of a cache with wrong content."""
    return DataError(f"the reference cache cannot be used: {path.name} {reason}", where={"file": path}, fix=_FIX)


def column(folder: Path, name: str, kind: str, length: int | None = None) -> NDArray[Any]:
    """Map a column of a cache."""
    return map_npy(folder / f"{name}.npy", kind, length)


def map_npy(path: Path, dtype: str, length: int | None = None) -> NDArray[Any]:
    """Map a one-dimensional .npy file; any other content is an error."""
    if not path.is_file():
        raise unusable(path, "is missing")
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, actual = read(file)
            offset = file.tell()
    except (ValueError, EOFError, SyntaxError):
        raise unusable(path, "has no .npy header") from None
    except OSError as error:
        raise MachineError(
            f"{path.name} cannot be read: {error.strerror}", where={"file": path}, fix="check its permissions"
        ) from error
    if actual != np.dtype(dtype) or len(shape) != 1:
        raise unusable(path, f"holds {actual} {list(shape)}, not one column of {np.dtype(dtype)}")
    if length is not None and shape[0] != length:
        raise unusable(path, f"holds {shape[0]:,} values, not {length:,}")
    size, expected = path.stat().st_size, offset + shape[0] * actual.itemsize
    if size != expected:
        raise unusable(path, f"has {size:,} bytes, not the {expected:,} its header states")
    return map_file(path, "|u1", expected)[offset:].view(actual)


def _counts(folder: Path) -> tuple[int, int]:
    """Numbers of events and users, as the cache states them."""
    if not (folder / READY).is_file():
        raise DataError(
            f"there is no complete reference cache here: {READY}, which is written last, is missing",
            where={"folder": folder},
            fix="wait until the cache is complete, or check the path",
        )
    path = folder / CACHE_META
    try:
        meta = load(path, linked=True)
        events, users = int(meta["total_events"]), int(meta["num_users"])
    except FileNotFoundError:
        raise unusable(path, "is missing") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise unusable(path, "does not state total_events and num_users") from None
    if events < 1 or users < 1:
        raise unusable(path, f"states {events} events of {users} users")
    return events, users


def _users(folder: Path, uid_E: Column, users: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of the users and positions of their first events, after checking the three tables against each other."""
    ids_U = column(folder, "unique_uids", USER_COLUMNS["unique_uids"], users)
    start, end = (column(folder, name, USER_COLUMNS[name]) for name in ("user_start", "user_end"))
    if ids_U[0] < 0 or (np.diff(ids_U) <= 0).any():
        raise unusable(folder / "unique_uids.npy", "does not hold ascending ids")
    for name, table in (("user_start", start), ("user_end", end)):
        if len(table) <= ids_U[-1]:
            raise unusable(folder / f"{name}.npy", f"ends before user {ids_U[-1]:,}")
    first_U1 = np.append(start[ids_U], len(uid_E))
    if first_U1[0] != 0 or (np.diff(first_U1) <= 0).any():
        raise unusable(folder / "user_start.npy", "does not divide the events among the users in their order")
    if (end[ids_U] != first_U1[1:]).any():
        raise unusable(folder / "user_end.npy", "does not end each user where the next begins")
    # Checking all users would read a page of the largest file for each.
    some = np.unique(np.linspace(0, users - 1, _CHECKED_USERS).astype(np.int64))
    if (uid_E[first_U1[some]] != ids_U[some]).any() or (uid_E[first_U1[some + 1] - 1] != ids_U[some]).any():
        raise unusable(folder / "flat_uid.npy", "does not match the table of users")
    return np.array(ids_U), first_U1


def _catalogue(folder: Path, maps: Path | None, items_E: Column) -> NDArray[np.uint32]:
    """Artists and albums, after checking that every item with events has a row."""
    place = (maps or folder.absolute().parents[1] / SHARED_MAPS).expanduser()
    for name in (ARTISTS_FILE, ALBUMS_FILE):
        if not (place / name).is_file():
            raise DataError(
                f"the reference cache needs the catalogue's maps; {name} is missing",
                where={"folder": place},
                fix="put the maps of the dataset there",
            )
    catalogue_I2 = catalogue(place / ARTISTS_FILE, place / ALBUMS_FILE)
    popularity = folder.absolute().parent / POPULARITY
    if popularity.is_file():
        count_I = map_npy(popularity, "<i8")
        if int(count_I.sum()) != len(items_E):
            raise unusable(popularity, f"counts {int(count_I.sum()):,} events; the cache has {len(items_E):,}")
        items = len(count_I)
    else:
        items = 1 + max(int(items_E[start : start + _STRIDE].max()) for start in range(0, len(items_E), _STRIDE))
    # The reference requires equal lengths. A longer catalogue is harmless, and usual: all sizes of Yambda share one.
    if items > len(catalogue_I2):
        raise DataError(
            f"the maps end at item {len(catalogue_I2) - 1:,}; the cache has events of item {items - 1:,}",
            where={"maps": place, "cache": folder},
            fix="use the maps that came with these events",
        )
    return catalogue_I2


def _described(folder: Path, events: int, users: int) -> dict[str, Any]:
    processed = folder.absolute().parent
    manifest: dict[str, Any] = {
        "name": processed.name.replace("processed_", "yambda-", 1),
        "synthetic": False,
        "licence": LICENCE,
        "events": events,
        "users": users,
        "digest": _identification(folder),
    }
    split = read_json(processed / SPLIT_META)
    if split:
        manifest["split"] = split
    written = read_json(processed / RECORD).get("facts")
    return manifest | (written if isinstance(written, dict) else {})


def read_json(path: Path) -> dict[str, Any]:
    """The object in an optional file next to the cache; empty if there is none."""
    if not os.path.lexists(path):
        return {}
    try:
        content = load(path, linked=True)
    except (OSError, ValueError) as error:
        raise unusable(path, f"cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise unusable(path, "cannot be read: it is not an object")
    return content


def _identification(folder: Path) -> str:
    """SHA-256 of the counts, and of the size and a few evenly spread pieces of every column.

    Files of anchors do not count, because the reference adds them to a finished cache.
    """
    digest = hashlib.sha256((folder / CACHE_META).read_bytes())
    for name in (*FLAT_COLUMNS, *USER_COLUMNS):
        path = folder / f"{name}.npy"
        size = path.stat().st_size
        digest.update(f"{name} {size}\n".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(max(0, size - _PIECE) * piece // (_PIECES - 1))
                digest.update(file.read(_PIECE))
    return digest.hexdigest()
