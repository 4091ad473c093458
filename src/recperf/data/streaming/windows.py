"""Time windows over an event store: finds the anchors of a window through an index, without reading all events.

Shapes: E events, U users, A users with anchors, W windows, R rows of the index, N positions, C events of a chunk,
S spans in it.

An anchor is a listen with at least `min_history` earlier events of its user. Window w holds the anchors from
t_min + w * seconds on, where t_min is the time of the earliest anchor. Events are sorted by user, then by time, so that
a user's events of one window are contiguous: a span. The index on disk has one row for every span with an anchor,
sorted by window: the user, the first position, the number of events, and the number of anchors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError, MachineError
from ...files import require_writable, write_atomic, write_json
from ...folders import new_folder, one_at_a_time
from ...jsonfile import Struct, as_json, read_sealed, sealed
from ...locations import home
from ...ops.hashing import GOLDEN, finalise_numpy_
from ...stop import poll
from ..blocks import Column, StoredColumn
from ..events.kinds import ANCHORS
from ..events.store import EventStore
from ..split.events import outermost
from .config import WindowConfig

Users = Literal["all", "train", "held-out", "fit", "choose"]
"""Whose anchors. Without cuts: those of all users, of training users, of held-out ones. With cuts: all anchors, those
before the held-out ones, the held-out ones; of those before them the ones to train on, and to choose the epoch by."""
Longs = NDArray[np.int64]

FORMAT, VERSION = "recperf-windows", 2
MANIFEST = "index.json"
COLUMNS = {"offsets": "<i8", "users": "<u4", "first": "<i8", "events": "<u4", "anchors": "<u4"}
"""Columns of the index: the first row of each window, and those of the rows."""
MOST_WINDOWS = 1 << 26
DIGEST_BLOCK = 1 << 20
"""Each block of this many bytes has a digest; a window is verified by the few blocks it needs."""
AT_ONCE = 64 << 20
"""An index of at most this many bytes is compared with its digests when it is opened, a larger one as it is used, so
that the first batch does not wait for gigabytes."""
FEWER = "fewer"
CHUNK = 1 << 18
"""Events read in one call, so that no call blocks other threads for long."""


class IndexSource(Struct, kw_only=True):
    """What an index of windows is made of."""

    format: str = FORMAT
    version: int = VERSION
    store: str
    """Digest of the events."""
    seconds: int
    min_history: int


class IndexManifest(IndexSource, kw_only=True):
    t_min: int
    t_max: int
    windows: int
    rows: int
    anchors: int
    digest_block: int
    columns: dict[str, StoredColumn]


class NoAnchors(DataError):
    """No event of the store has enough earlier events of its user."""


def unit(uids: NDArray[Any], salt: int) -> NDArray[np.float64]:
    """A number in [0, 1) per user: the top 53 bits of splitmix64's finaliser of id + increment + salt."""
    words = np.asarray(uids).astype(np.int64).view(np.uint64) + np.uint64((GOLDEN + salt) % (1 << 64))
    return (finalise_numpy_(words) >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def shuffled(positions_N: Longs, fraction: float, seed: int) -> Longs:
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
    offsets_W1: Longs
    """First row of each window."""
    users_R: Column
    """Indices of users in the store, ascending within a window."""
    first_R: Column
    events_R: Column
    anchors_R: Column
    cuts: tuple[Longs, Longs] | None = None
    """For each user the positions from which on its events choose the epoch, and are held out; None: users are divided
    by a hash."""
    fewer: tuple[Users, Callable[[Longs], Longs]] | None = None
    """A part, and what leaves some of the positions of its anchors (fewer.py); None: all stay."""
    _counts: dict[str, Longs] = field(default_factory=dict, repr=False)

    @staticmethod
    def open(store: EventStore, config: WindowConfig, cuts: tuple[Longs, Longs] | None = None) -> WindowIndex:
        """Open the index of a store; build it if it does not exist.

        Its folder is in the store, or in the user's cache folder if the store is read-only or a reference cache.
        """
        source = IndexSource(store=store.digest, seconds=config.seconds, min_history=config.min_history)
        key = hashlib.sha256(json.dumps(as_json(source), sort_keys=True).encode()).hexdigest()[:24]
        folders = [*([store.folder / "windows"] if store.layout == "packed" else []), home() / "windows"]
        for folder in folders:
            if (index := _read(folder / key, store, config, source)) is not None:
                return replace(index, cuts=cuts)
        for folder in folders[:-1]:
            with suppress(MachineError):
                require_writable(folder)
                break
        else:
            folder = folders[-1]
            require_writable(folder)
        with one_at_a_time(folder / f"{key}.lock"):
            if (index := _read(folder / key, store, config, source)) is None:
                # A damaged index of ours is replaced.
                with new_folder(folder / key, ours="|".join(map(re.escape, (*COLUMNS, MANIFEST)))) as draft:
                    build(store, draft, source)
                index = _read(folder / key, store, config, source)
        if index is None:
            what = "the index of windows cannot be read back after it was written"
            raise MachineError(what, where={"folder": folder / key}, fix="check the disk")
        return replace(index, cuts=cuts)

    @cached_property
    def trains_U(self) -> NDArray[np.bool_]:
        """Whether each user of the store is a training user; the others are held out."""
        return unit(self.store.user_ids_U, self.config.split_salt) < self.config.train_share

    def counts(self, users: Users = "all") -> Longs:
        """Number of anchors of every window."""
        if self.fewer is None or users != self.fewer[0]:
            return self._stored_counts(users)
        if FEWER not in self._counts:
            stored_W = self._stored_counts(users)
            left = [len(self.anchors(window, users)) if stored_W[window] else 0 for window in range(self.windows)]
            self._counts[FEWER] = np.array(left, np.int64)
            self._counts[FEWER].setflags(write=False)
        return self._counts[FEWER]

    def _stored_counts(self, users: Users) -> Longs:
        """The same if all stay."""
        if users not in self._counts:
            values_R = self.anchors_R[:]
            if users != "all" and self.cuts is not None:
                values_R = self._cut_counts(users)
            elif users != "all":
                values_R = values_R * self._selected(slice(0, len(values_R)), users)
            before_R1 = np.concatenate([[0], np.cumsum(values_R, dtype=np.int64)])
            self._counts[users] = np.diff(before_R1[self.offsets_W1])
            self._counts[users].setflags(write=False)
        return self._counts[users]

    def anchors(self, window: int, users: Users = "all") -> Longs:
        """Positions of a window's anchors, ascending: by user, then by time."""
        if not 0 <= window < self.windows:
            raise DataError(
                f"there is no window {window}: the data has windows 0 to {self.windows - 1}",
                where={"store": self.store.folder},
                fix="choose windows within that range",
            )
        rows = slice(*self.offsets_W1[window : window + 2].tolist())
        self.verify(rows)
        if users == "all" or self.cuts is None:
            selected = slice(None) if users == "all" else self._selected(rows, users)
            first, events = self.first_R[rows][selected], self.events_R[rows][selected].astype(np.int64)
            stated = int(self.anchors_R[rows][selected].sum(dtype=np.int64))
        else:
            first, events = self._cut(rows, users)
            stated = int(self._stored_counts(users)[window])
        if len(first) and (first.min() < 0 or (first + events).max() > self.store.events):
            raise _damaged(self.folder, self.store)
        ends, parts = np.cumsum(events), [np.empty(0, np.int64)]
        for part in np.split(np.arange(len(first)), np.searchsorted(ends, np.arange(CHUNK, ends[-1:].sum(), CHUNK))):
            inside = _within(first[part], events[part])
            parts.append(inside[is_listen(self.store, inside)])
        positions = np.concatenate(parts)
        if len(positions) != stated:
            raise _damaged(self.folder, self.store)
        return positions if self.fewer is None or users != self.fewer[0] else self.fewer[1](positions)

    def order(self, window: int, users: Users = "all") -> Longs:
        """A window's anchors in training order: a pure function of the config's seed and the window."""
        return shuffled(self.anchors(window, users), self.config.shuffle, self.config.shuffle_seed + window)

    def verify(self, rows: slice) -> None:
        """Compare rows of the index with their digests; a difference is an error."""
        for column in (self.users_R, self.first_R, self.events_R, self.anchors_R):
            column.require(rows.start, rows.stop)

    def _cut(self, rows: slice, users: Users) -> tuple[Longs, Longs]:
        """First events and numbers of events of rows, as far as they lie between the cuts; 0 events where none do."""
        assert self.cuts is not None
        of_rows, (choosing_U, held_out_U) = self.users_R[rows], self.cuts
        first, end = self.first_R[rows], self.first_R[rows] + self.events_R[rows].astype(np.int64)
        if users in ("choose", "held-out"):
            first = np.clip((choosing_U if users == "choose" else held_out_U)[of_rows], first, end)
        if users != "held-out":
            end = np.clip((choosing_U if users == "fit" else held_out_U)[of_rows], first, end)
        return first, end - first

    def _cut_counts(self, users: Users) -> Longs:
        """Anchors of every row between the cuts: those of the index where a row is not cut."""
        first, events = self._cut(slice(0, len(self.first_R)), users)
        counts = self.anchors_R[:] * (events > 0)
        cut = np.flatnonzero((events > 0) & (events < self.events_R[:]))
        for part in np.array_split(cut, 1 + int(events[cut].sum()) // CHUNK) if len(cut) else ():
            listens = is_listen(self.store, _within(first[part], events[part]))
            counts[part] = np.add.reduceat(listens, np.cumsum(events[part]) - events[part], dtype=np.int64)
        return np.asarray(counts, np.int64)

    def _selected(self, rows: slice, users: Users) -> NDArray[np.bool_]:
        users_R = self.users_R[rows]
        if len(users_R) and users_R.max() >= self.store.users:
            raise _damaged(self.folder, self.store)
        trains: NDArray[np.bool_] = self.trains_U[users_R]
        return trains if users == "train" else ~trains


def _damaged(folder: Path, store: EventStore) -> DataError:
    return DataError(
        "the index of windows is damaged, or belongs to other events",
        where={"index": folder, "store": store.folder},
        fix=f"remove {folder}; the next start builds it again",
    )


def _read(folder: Path, store: EventStore, config: WindowConfig, source: IndexSource) -> WindowIndex | None:
    """The index of this store; None if it does not exist or is damaged."""
    try:
        manifest = read_sealed(
            folder / MANIFEST, (FORMAT, VERSION), IndexManifest, fix="the next start builds it again"
        )
        if any(getattr(manifest, name) != value for name, value in as_json(source).items()):
            return None
        columns = {}
        for name, kind in COLUMNS.items():
            columns[name] = manifest.columns[name].mapped(
                folder / name, kind, block=manifest.digest_block, damaged=lambda *_: _damaged(folder, store)
            )
        index = WindowIndex(
            store=store,
            config=config,
            folder=folder,
            windows=manifest.windows,
            t_min=manifest.t_min,
            t_max=manifest.t_max,
            offsets_W1=columns.pop("offsets")[:],
            **{f"{name}_R": column for name, column in columns.items()},  # type: ignore[arg-type]
        )
        if sum(column.array.nbytes for column in columns.values()) <= AT_ONCE:
            index.verify(slice(0, manifest.rows))
    except (OSError, ValueError, KeyError, TypeError, DataError, MachineError):
        return None
    return index


def _within(first: Longs, events: Longs) -> Longs:
    """The positions of ranges of events, one range after the other."""
    inside = np.repeat(first - np.cumsum(events) + events, events)
    return inside + np.arange(len(inside))


def is_listen(store: EventStore, which: slice | Longs) -> NDArray[np.bool_]:
    """Whether events are listens or negatives that an import drew: what can be an anchor."""
    return np.asarray((store.kinds(which) & np.uint8(ANCHORS)) != 0)


def build(store: EventStore, folder: Path, source: IndexSource) -> None:
    """Write the index of a store into an empty folder: one pass over the events, about 40 bytes of memory for a row."""
    low_U, high_U = store.user_first_U1[:-1] + source.min_history * store.stored_per_event, store.user_first_U1[1:]
    listens = partial(is_listen, store)
    start_U = outermost(low_U, high_U, 1, listens)
    users_A = np.flatnonzero(start_U >= 0)
    if not len(users_A):
        longest = int(np.diff(store.user_first_U1).max(initial=0)) // store.stored_per_event
        raise NoAnchors(
            f"no listen has {source.min_history:,} earlier events of its user; the most active user has {longest:,} "
            "events",
            where={"store": store.folder},
            fix="lower window.min_history, or use a larger dataset",
        )
    start_A, last_A = start_U[users_A], outermost(low_U[users_A], high_U[users_A], -1, listens)
    t_min, t_max = int(store.times_E[start_A].min()), int(store.times_E[last_A].max())
    windows = -(-(t_max - t_min + 1) // source.seconds)
    if windows > MOST_WINDOWS:
        raise ConfigError(
            f"window.seconds is {source.seconds:,}, which gives {windows:,} windows; the maximum is {MOST_WINDOWS:,}",
            where={"field": "window.seconds"},
            fix="choose a longer window",
        )
    parts = []
    # Whole users, about a chunk of events at a time.
    edges = np.searchsorted(last_A, np.arange(start_A[0], last_A[-1], CHUNK))
    for users in np.split(np.arange(len(users_A)), np.unique(edges)):
        poll()
        if len(users):
            parts.append(_spans(store, users_A[users], start_A[users], last_A[users] + 1, t_min, source.seconds))
    rows_R = np.concatenate(parts)
    parts.clear()
    # numpy sorts 16-bit keys by radix, which is fast.
    order_R = np.argsort(rows_R["window"].astype(np.uint16 if windows <= 1 << 16 else np.uint32), kind="stable")
    columns = {}
    offsets_W1 = np.concatenate([[0], np.cumsum(np.bincount(rows_R["window"], minlength=windows))])
    for name, kind in COLUMNS.items():
        content = (offsets_W1 if name == "offsets" else rows_R[name][order_R]).astype(kind).tobytes()
        write_atomic(folder / name, content, fix="the next start builds the index again")
        columns[name] = StoredColumn.of(folder / name, block=DIGEST_BLOCK)
    manifest = IndexManifest(
        **as_json(source),
        t_min=t_min,
        t_max=t_max,
        windows=windows,
        rows=len(rows_R),
        anchors=int(rows_R["anchors"].sum(dtype=np.int64)),
        digest_block=DIGEST_BLOCK,
        columns=columns,
    )
    write_json(folder / MANIFEST, sealed(manifest))


def _spans(store: EventStore, users_A: Longs, start_A: Longs, stop_A: Longs, t_min: int, seconds: int) -> NDArray[Any]:
    """The rows of some users, by user, then by window; a user's anchors are from `start` to before `stop`."""
    begin, end = int(start_A[0]), int(stop_A[-1])
    window_C = (store.times_E[begin:end].astype(np.int64) - t_min) // seconds
    begins_C = np.append(True, window_C[1:] != window_C[:-1])
    begins_C[start_A - begin] = True
    begins_C[stop_A[:-1] - begin] = True
    edges_S = np.flatnonzero(begins_C)
    listens_S = np.add.reduceat(is_listen(store, slice(begin, end)), edges_S, dtype=np.uint32)
    events_S, owner_S = np.diff(edges_S, append=end - begin), np.searchsorted(start_A - begin, edges_S, "right") - 1
    # Between the anchors of one user and the next lie events that are no anchors.
    inside_S = edges_S + begin < stop_A[owner_S]
    edges_S, listens_S, events_S, owner_S = (part[inside_S] for part in (edges_S, listens_S, events_S, owner_S))
    window_S = window_C[edges_S]
    if ((np.diff(owner_S) == 0) & (np.diff(window_S) <= 0)).any():
        raise DataError(
            "events of a user are not sorted by time",
            where={"store": store.folder},
            fix="recperf data check names the place; prepare the data again",
        )
    rows = np.empty(len(edges_S), [("window", "<u4"), *[(name, COLUMNS[name]) for name in [*COLUMNS][1:]]])
    rows["window"], rows["users"], rows["first"] = window_S, users_A[owner_S], edges_S + begin
    rows["events"], rows["anchors"] = events_S, listens_S
    return np.asarray(rows[listens_S > 0])
