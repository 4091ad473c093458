"""Opens the flat-event cache of the MLPerf reference; nothing is copied or converted.

Shapes: E events, U users, I items of the catalogue.

The reference has one .npy file per column, 40 bytes per event, in `<root>/processed_<size>/hstu_cache_L<length>/`, and
the catalogue as two maps in `<root>/shared_metadata/`.
"""

from __future__ import annotations

import errno
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ....errors import DataError, MachineError, notice_once
from ....files import NOT_FILES, open_dataset_file
from ....jsonfile import load
from ...blocks import Column
from ...events.kinds import LIKE, NEGATIVE, POSITIVE
from ...events.manifest import EventManifest
from ...events.store import EventStore, Which
from ...streaming.features import ORGANIC
from .raw import catalogue, map_file
from .rows import TYPE_SHIFT
from .schema import ALBUMS_FILE, ARTISTS_FILE, ITEM_GROUPS, LICENCE

READY, CACHE_META = "_READY", "store_meta.json"

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
KIND_COLUMNS = ("flat_is_listen_plus", "flat_is_like", "flat_is_skip", "flat_is_organic", "flat_event_types")
FLAT_BYTES = sum(np.dtype(kind).itemsize for kind in FLAT_COLUMNS.values())
"""Bytes of an event, without the reference's files of anchors."""
USER_COLUMNS = ("unique_uids", "user_start", "user_end")

_FIX = "build the cache again, or fetch this file from where the cache came from"
_PIECE, _PIECES = 4096, 8
_CHECKED_USERS = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceStore(EventStore):
    """A cache of the reference: listen-plus, like, skip, whether an event was organic, and types, a column for each."""

    layout: ClassVar[str] = "reference"

    def kinds(self, which: Which) -> NDArray[np.uint8]:
        plus, like, skip, organic, types = (column[which].astype(np.uint8) for column in self.kind_columns)
        kinds = plus * POSITIVE | like * LIKE | skip * NEGATIVE | (organic != 0) * np.uint8(ORGANIC)
        return np.asarray(kinds | types << TYPE_SHIFT, dtype=np.uint8)


def open_reference(cache_folder: Path) -> EventStore:
    """Open a complete cache of the reference.

    A cache has no digests by which it could be verified as it is read; its own identifies it by its sizes and a sample
    of its bytes.
    """
    folder = cache_folder.expanduser()
    events, users = _counts(folder)
    notice_once(
        f"{folder} has no digests: training does not notice damage; recperf data check FOLDER --sums FILE compares it "
        "with a list of SHA-256 sums"
    )
    flat = {name: Column(_column(folder, name, kind, events)) for name, kind in FLAT_COLUMNS.items()}
    maps = (map_file([folder.absolute().parents[1]], name) for name in (ARTISTS_FILE, ALBUMS_FILE))
    user_ids_U, user_first_U1 = _users(folder, flat["flat_uid"], users)
    return ReferenceStore(
        folder=folder,
        user_ids_U=user_ids_U,
        user_first_U1=user_first_U1,
        items_E=flat["flat_item_ids"],
        times_E=flat["flat_timestamps"],
        groups_IG=catalogue(*maps),
        kind_columns=tuple(flat[name] for name in KIND_COLUMNS),
        manifest=EventManifest(
            name=folder.absolute().parent.name.replace("processed_", "yambda-", 1),
            synthetic=False,
            licence=LICENCE,
            events=events,
            users=users,
            groups=[*ITEM_GROUPS],
            digest=_identification(folder),
        ),
    )


def _unusable(path: Path, reason: str) -> DataError:
    """The error for a file of a cache with wrong content."""
    return DataError(f"the reference cache cannot be used: {path.name} {reason}", where={"file": path}, fix=_FIX)


def _column(folder: Path, name: str, dtype: str = "<i8", length: int | None = None) -> NDArray[Any]:
    """Map a one-dimensional .npy file; any other content is an error."""
    path = folder / f"{name}.npy"
    try:
        # A fifo would wait for ever.
        open_dataset_file(path).close()
        column: NDArray[Any] = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, SyntaxError):
        raise _unusable(path, "is cut short or not a .npy file") from None
    except OSError as error:
        if error.errno in NOT_FILES:
            raise _unusable(path, "is missing" if error.errno == errno.ENOENT else "is not a file") from None
        what = f"{path.name} cannot be read: {error.strerror}"
        raise MachineError(what, where={"file": path}, fix="check its permissions") from error
    if column.dtype != np.dtype(dtype) or column.ndim != 1:
        raise _unusable(path, f"holds {column.dtype} {list(column.shape)}, not one column of {np.dtype(dtype)}")
    if length is not None and len(column) != length:
        raise _unusable(path, f"holds {len(column):,} values, not {length:,}")
    return np.asarray(column)


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
        meta = load(path, follow_links=True)
        events, users = int(meta["total_events"]), int(meta["num_users"])
    except FileNotFoundError:
        raise _unusable(path, "is missing") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise _unusable(path, "does not state total_events and num_users") from None
    if events < 1 or users < 1:
        raise _unusable(path, f"states {events} events of {users} users")
    return events, users


def _users(folder: Path, uid_E: Column, users: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of the users and positions of their first events, after checking the three tables against each other."""
    ids_U = _column(folder, "unique_uids", length=users)
    start, end = (_column(folder, name) for name in ("user_start", "user_end"))
    if ids_U[0] < 0 or (np.diff(ids_U) <= 0).any():
        raise _unusable(folder / "unique_uids.npy", "does not hold ascending ids")
    for name, table in (("user_start", start), ("user_end", end)):
        if len(table) <= ids_U[-1]:
            raise _unusable(folder / f"{name}.npy", f"ends before user {ids_U[-1]:,}")
    first_U1 = np.append(start[ids_U], len(uid_E))
    if first_U1[0] != 0 or (np.diff(first_U1) <= 0).any():
        raise _unusable(folder / "user_start.npy", "does not divide the events among the users in their order")
    if (end[ids_U] != first_U1[1:]).any():
        raise _unusable(folder / "user_end.npy", "does not end each user where the next begins")
    # Checking all users would read a page of the largest file for each.
    some = np.unique(np.linspace(0, users - 1, _CHECKED_USERS).astype(np.int64))
    if (uid_E[first_U1[some]] != ids_U[some]).any() or (uid_E[first_U1[some + 1] - 1] != ids_U[some]).any():
        raise _unusable(folder / "flat_uid.npy", "does not match the table of users")
    return np.array(ids_U), first_U1


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
