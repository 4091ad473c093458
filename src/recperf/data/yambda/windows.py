"""Time windows over an event store: finds the anchors of a window through an index, without reading all events.

Shapes: U users, W windows, R rows of the index, N positions.

An anchor is a listen with at least `min_history` earlier events of its user. Window w holds the anchors from
t_min + w * seconds on, where t_min is the time of the earliest anchor. The index (window_build.py) has one row for
every user and window with an anchor: the first position, the number of events, and the number of anchors.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, MachineError
from ...files import require_writable
from ...folders import fresh_folder, one_at_a_time
from ...jsonfile import as_json, read_sealed
from ...ops.splitmix import GOLDEN, finalise_numpy_
from ...places import home
from ..blocks import Blocks, Column
from .config import WindowConfig
from .store import EventStore, map_file
from .window_build import (
    COLUMNS,
    FORMAT,
    MANIFEST,
    OFFSETS,
    VERSION,
    IndexManifest,
    IndexSource,
    build,
    is_listen,
)

Users = Literal["all", "train", "held-out"]

_BLOCK = 1 << 18
"""Events read in one call, so that no call blocks other threads for long."""
_STRIDE = 1 << 22
_AT_ONCE = 64 << 20
"""An index of at most this many bytes is compared with its digests when it is opened, a larger one as it is used, so
that the first batch does not wait for gigabytes."""


def unit(uids: NDArray[Any], salt: int) -> NDArray[np.float64]:
    """A number in [0, 1) per user: the top 53 bits of splitmix64's finaliser of id + increment + salt."""
    words = np.asarray(uids).astype(np.int64).view(np.uint64) + np.uint64((GOLDEN + salt) % (1 << 64))
    return (finalise_numpy_(words) >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def train_user(uids: NDArray[Any], share: float, salt: int) -> NDArray[np.bool_]:
    """Whether each user is a training user; the others are held out."""
    return unit(uids, salt) < share


def shuffled(positions_N: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.int64]:
    """Positions shuffled within consecutive blocks that are `fraction` of them long, by numpy's PCG64.

    numpy may change the stream of `default_rng` between versions; a test pins the result.
    """
    count = len(positions_N)
    block = count if fraction >= 1 else round(fraction * count)
    if block < 2:
        return positions_N
    draw, result = np.random.default_rng(seed), positions_N.copy()
    for start in range(0, count, block):
        draw.shuffle(result[start : start + block])
    return result


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowIndex:
    """Finds the anchors of a window."""

    store: EventStore
    config: WindowConfig
    folder: Path
    """Folder of the index."""
    windows: int
    t_min: int
    """Time of the earliest anchor."""
    t_max: int
    """Time of the latest."""
    offsets_W1: NDArray[np.int64]
    """First row of each window."""
    users_R: Column
    """Indices of users in the store, ascending within a window."""
    first_R: Column
    events_R: Column
    anchors_R: Column
    _counts: dict[str, NDArray[np.int64]] = field(default_factory=dict, repr=False)

    @staticmethod
    def open(store: EventStore, config: WindowConfig, *, cache: Path | None = None) -> WindowIndex:
        """Open the index of a store; build it if it does not exist.

        Its folder is in `cache`, by default in the store, or in the user's cache folder if the store is read-only or
        a reference cache.
        """
        source = IndexSource(
            format=FORMAT,
            version=VERSION,
            store=store.digest,
            seconds=config.seconds,
            min_history=config.min_history,
        )
        key = hashlib.sha256(json.dumps(as_json(source), sort_keys=True).encode()).hexdigest()[:24]
        places = [cache.expanduser()] if cache is not None else _default_folders(store)
        for place in places:
            if (index := _read(place / key, store, config, source)) is not None:
                return index
        place = _first_writable(places)
        with one_at_a_time(place / f"{key}.lock"):
            if (index := _read(place / key, store, config, source)) is None:
                _write(place / key, store, source)
                index = _read(place / key, store, config, source)
        if index is None:
            raise MachineError(
                "the index of windows cannot be read back after it was written",
                where={"folder": place / key},
                fix="check the disk",
            )
        return index

    @cached_property
    def trains_U(self) -> NDArray[np.bool_]:
        """Whether each user of the store is a training user."""
        return train_user(self.store.user_ids_U, self.config.train_share, self.config.split_salt)

    def counts(self, users: Users = "all") -> NDArray[np.int64]:
        """Number of anchors of every window."""
        if users not in self._counts:
            counts_W = self._count(users)
            counts_W.setflags(write=False)
            self._counts[users] = counts_W
        return self._counts[users]

    def anchors(self, window: int, users: Users = "all") -> NDArray[np.int64]:
        """Positions of a window's anchors, ascending: by user, then by time."""
        rows = self._rows(window, users)
        self.verify(*self.offsets_W1[window : window + 2].tolist())
        first, events = self.first_R[rows], self.events_R[rows].astype(np.int64)
        expected, ends = int(self.anchors_R[rows].sum(dtype=np.int64)), np.cumsum(events)
        if not len(first):
            return np.empty(0, np.int64)
        if first.min() < 0 or int((first + events).max()) > self.store.events or expected > ends[-1]:
            raise self._damaged()
        positions, done, begin = np.empty(expected, np.int64), 0, 0
        while begin < len(first):
            base = int(ends[begin - 1]) if begin else 0
            stop = max(begin + 1, int(np.searchsorted(ends, base + _BLOCK, side="right")))
            inside = np.repeat(first[begin:stop] - ends[begin:stop] + events[begin:stop] + base, events[begin:stop])
            inside += np.arange(len(inside))
            listens = inside[is_listen(self.store, inside)]
            if done + len(listens) > expected:
                raise self._damaged()
            positions[done : done + len(listens)] = listens
            done, begin = done + len(listens), stop
        if done != expected:
            raise self._damaged()
        return positions

    def order(self, window: int, users: Users = "all") -> NDArray[np.int64]:
        """A window's anchors in training order: a pure function of the config's seed and the window."""
        return shuffled(self.anchors(window, users), self.config.shuffle, self.config.shuffle_seed + window)

    def holdout(self, first: int, windows: int = 1, users: Users = "held-out") -> NDArray[np.int64]:
        """Positions of the anchors to evaluate on, window after window, ascending in each.

        If every user is a training user, "held-out" means all users.
        """
        if users == "held-out" and self.config.train_share >= 1:
            users = "all"
        parts = [self.anchors(window, users) for window in range(first, first + windows)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def verify(self, first: int = 0, stop: int | None = None) -> None:
        """Compare rows of the index, by default all, with their digests; a difference is an error."""
        for column in (self.users_R, self.first_R, self.events_R, self.anchors_R):
            column.require(first, len(column) if stop is None else stop)

    def _rows(self, window: int, users: Users) -> slice | NDArray[np.int64]:
        if not 0 <= window < self.windows:
            raise DataError(
                f"there is no window {window}: the data has windows 0 to {self.windows - 1}",
                where={"store": self.store.folder},
                fix="choose windows within that range",
            )
        begin, end = int(self.offsets_W1[window]), int(self.offsets_W1[window + 1])
        if users == "all":
            return slice(begin, end)
        return np.flatnonzero(self._selected(slice(begin, end), users)) + begin

    def _selected(self, rows: slice, users: Users) -> NDArray[np.bool_]:
        users_R = self.users_R[rows]
        if len(users_R) and users_R.max() >= self.store.users:
            raise self._damaged()
        trains: NDArray[np.bool_] = self.trains_U[users_R]
        return trains if users == "train" else ~trains

    def _count(self, users: Users) -> NDArray[np.int64]:
        """Sums of the index's rows by window, in chunks of bounded size."""
        before_W1, total, rows = np.zeros(self.windows + 1, np.int64), 0, len(self.anchors_R)
        for begin in range(0, rows, _STRIDE):
            part = slice(begin, min(rows, begin + _STRIDE))
            values = self.anchors_R[part]
            if users != "all":
                values = values * self._selected(part, users)
            running = np.cumsum(values, dtype=np.int64)
            low, high = np.searchsorted(self.offsets_W1, [begin, part.stop], side="right")
            before_W1[low:high] = total + running[self.offsets_W1[low:high] - begin - 1]
            total += int(running[-1])
        return np.diff(before_W1)

    def _damaged(self) -> DataError:
        return _damaged_index(self.folder, self.store)


def _damaged_index(folder: Path, store: EventStore) -> DataError:
    return DataError(
        "the index of windows is damaged, or belongs to other events",
        where={"index": folder, "store": store.folder},
        fix=f"remove {folder}; the next start builds it again",
    )


def _default_folders(store: EventStore) -> list[Path]:
    """Folders of the indexes of a store, in the order of preference."""
    return [*([store.folder / "windows"] if store.layout == "packed" else []), home() / "windows"]


def _read(folder: Path, store: EventStore, config: WindowConfig, source: IndexSource) -> WindowIndex | None:
    """The index of this store; None if it does not exist or is damaged."""
    try:
        fix = f"remove {folder}; the next start builds it again"
        manifest = read_sealed(folder / MANIFEST, (FORMAT, VERSION), IndexManifest, fix=fix)
        if any(getattr(manifest, name) != value for name, value in as_json(source).items()):
            return None
        columns = {name: _column(folder, name, manifest, store) for name in COLUMNS}
        index = WindowIndex(
            store=store,
            config=config,
            folder=folder,
            windows=manifest.windows,
            t_min=manifest.t_min,
            t_max=manifest.t_max,
            offsets_W1=columns[OFFSETS][:],
            users_R=columns["users"],
            first_R=columns["first"],
            events_R=columns["events"],
            anchors_R=columns["anchors"],
        )
        if sum(column.array.nbytes for column in columns.values()) <= _AT_ONCE:
            index.verify()
    except (OSError, ValueError, KeyError, TypeError, DataError, MachineError):
        return None
    return index


def _column(folder: Path, name: str, manifest: IndexManifest, store: EventStore) -> Column:
    path, stated = folder / name, manifest.columns[name]
    array = map_file(path, COLUMNS[name], stated.bytes)
    blocks = Blocks(
        path,
        array.view(np.uint8),
        stated.blocks,
        block=manifest.digest_block,
        damaged=lambda *_: _damaged_index(folder, store),
    )
    return Column(array, blocks)


def _write(folder: Path, store: EventStore, source: IndexSource) -> None:
    """Build the index; a damaged one of ours is replaced."""
    with fresh_folder(folder, ours="|".join(map(re.escape, (*COLUMNS, MANIFEST)))) as draft:
        build(store, draft, source)


def _first_writable(places: list[Path]) -> Path:
    for place in places[:-1]:
        with suppress(MachineError):
            require_writable(place)
            return place
    require_writable(places[-1])
    return places[-1]
