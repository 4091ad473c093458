"""Builds the index of windows on disk: one pass over the events, in bounded memory.

Shapes: E events, U users, W windows, R rows of the index, C events of a chunk, S spans in it.

Events are sorted by user, then by time, so that a user's events of one window are contiguous: a span. The index has
one row for every span with an anchor. The pass finds the rows by user; a counting sort orders them by window.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from ...files import write_json, writing
from ...jsonfile import Struct, as_json, sealed
from ...stop import poll
from ..blocks import StoredColumn
from .schema import ANCHORS
from .store import EventStore

FORMAT, VERSION = "recperf-windows", 2
MANIFEST = "index.json"
OFFSETS = "offsets"
ROW_COLUMNS = {"users": "<u4", "first": "<i8", "events": "<u4", "anchors": "<u4"}
COLUMNS = {OFFSETS: "<i8", **ROW_COLUMNS}
MOST_WINDOWS = 1 << 26
DIGEST_BLOCK = 1 << 20
"""Each block of this many bytes has a digest; a window is verified by the few blocks it needs."""

_ROW = np.dtype([("window", "<u4"), *ROW_COLUMNS.items()])
_DRAFT = "rows"
_CHUNK = 1 << 18
_STEPS = 32
_FIX = "the next start builds the index again"


class IndexSource(Struct, kw_only=True):
    """What an index of windows is made of."""

    format: str
    version: int
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


@dataclass(frozen=True, kw_only=True)
class AnchorRange:
    """Users with anchors, and the positions and times of their first and last anchors."""

    users: NDArray[np.int64]
    start: NDArray[np.int64]
    """Position of a user's first anchor."""
    stop: NDArray[np.int64]
    """One more than the position of the last."""
    t_min: int
    t_max: int

    def windows(self, seconds: int) -> int:
        return -(-(self.t_max - self.t_min + 1) // seconds)


def is_listen(store: EventStore, which: slice | NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether events are listens or negatives that an import drew: what can be an anchor."""
    return np.asarray((store.kinds(which) & np.uint8(ANCHORS)) != 0)


def anchor_range(store: EventStore, min_history: int) -> AnchorRange:
    """The first and last anchor of each user, found by reading few events of each."""
    low_U, high_U = store.user_first_U1[:-1] + min_history * store.stored_per_event, store.user_first_U1[1:]
    start_U = _outermost(store, low_U, high_U, 1)
    users = np.flatnonzero(start_U >= 0)
    if not len(users):
        longest = int(np.diff(store.user_first_U1).max(initial=0)) // store.stored_per_event
        raise NoAnchors(
            f"no listen has {min_history:,} earlier events of its user; the most active user has {longest:,} events",
            where={"store": store.folder},
            fix="lower window.min_history, or use a larger dataset",
        )
    start = start_U[users]
    last = _outermost(store, low_U[users], high_U[users], -1)
    t_min, t_max = int(store.times_E[start].min()), int(store.times_E[last].max())
    return AnchorRange(users=users, start=start, stop=last + 1, t_min=t_min, t_max=t_max)


def _outermost(store: EventStore, low_U: NDArray[np.int64], high_U: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """The first (step 1) or last (step -1) listen of every user between low and high; -1 if there is none."""
    position_U = np.full(len(low_U), -1, np.int64)
    place_U = (low_U if step > 0 else high_U - 1).copy()
    left = np.flatnonzero(low_U < high_U)
    # Nearly every event is a listen: a few steps, each for all users at once, find almost all.
    for _ in range(_STEPS):
        hit = is_listen(store, place_U[left])
        position_U[left[hit]] = place_U[left[hit]]
        left = left[~hit]
        place_U[left] += step
        left = left[(low_U[left] <= place_U[left]) & (place_U[left] < high_U[left])]
        if not len(left):
            return position_U
    for user in left.tolist():
        position_U[user] = _scan(store, int(low_U[user]), int(high_U[user]), step)
    return position_U


def _scan(store: EventStore, low: int, high: int, step: int) -> int:
    blocks = range(low, high, _CHUNK)
    for begin in blocks if step > 0 else reversed(blocks):
        hits = np.flatnonzero(is_listen(store, slice(begin, min(high, begin + _CHUNK))))
        if len(hits):
            return begin + int(hits[0] if step > 0 else hits[-1])
    return -1


def rows_by_user(store: EventStore, anchors: AnchorRange, seconds: int, chunk: int = _CHUNK) -> Iterator[NDArray[Any]]:
    """Rows of the index by user, then by window."""
    begin, end = int(anchors.start[0]), int(anchors.stop[-1])
    last = np.empty(0, _ROW)
    for position in range(begin, end, chunk):
        rows = np.concatenate([last, _spans(store, anchors, seconds, position, min(end, position + chunk))])
        rows = _joined(rows, len(last))
        same = rows["users"][1:] == rows["users"][:-1]
        if (same & (rows["window"][1:] <= rows["window"][:-1])).any():
            raise DataError(
                "events of a user are not sorted by time",
                where={"store": store.folder},
                fix="recperf data check names the place; prepare the data again",
            )
        # The last span may continue in the next chunk.
        last, rows = rows[-1:], rows[:-1]
        yield rows[rows["anchors"] > 0]
    yield last[last["anchors"] > 0]


def _spans(store: EventStore, anchors: AnchorRange, seconds: int, begin: int, end: int) -> NDArray[Any]:
    """Spans of one user and one window between two positions."""
    around = slice(np.searchsorted(anchors.stop, begin, side="right"), np.searchsorted(anchors.start, end))
    start, stop = anchors.start[around], anchors.stop[around]
    if not len(start):
        return np.empty(0, _ROW)
    window_C = _windows_of(store.times_E[begin:end], anchors, seconds)
    begins_C = np.ones(end - begin, np.bool_)
    np.not_equal(window_C[1:], window_C[:-1], out=begins_C[1:])
    begins_C[np.maximum(start - begin, 0)] = True
    begins_C[stop[stop < end] - begin] = True
    edges_S = np.flatnonzero(begins_C)
    owner_S = np.searchsorted(start, edges_S + begin, side="right") - 1
    inside_S = (owner_S >= 0) & (edges_S + begin < stop[owner_S])
    rows = np.empty(len(edges_S), _ROW)
    rows["window"] = window_C[edges_S]
    rows["users"] = anchors.users[around][owner_S]
    rows["first"] = edges_S + begin
    rows["events"] = np.diff(edges_S, append=end - begin)
    listens_C = is_listen(store, slice(begin, end)).view(np.uint8)
    rows["anchors"] = np.add.reduceat(listens_C, edges_S, dtype=np.uint32)
    return rows[inside_S]


def _windows_of(times_C: NDArray[Any], anchors: AnchorRange, seconds: int) -> NDArray[Any]:
    if anchors.windows(seconds) == 1:
        return np.zeros(len(times_C), np.uint32)
    # Times outside the range of the anchors wrap around; their spans are dropped.
    kind = times_C.dtype.type
    return np.asarray((times_C - kind(anchors.t_min)) // kind(seconds))


def _joined(rows: NDArray[Any], carried: int) -> NDArray[Any]:
    """Rows with a carried-over first row merged into the second if both are parts of one span."""
    if not carried or len(rows) < 2 or rows["users"][0] != rows["users"][1] or rows["window"][0] != rows["window"][1]:
        return rows
    rows["first"][1] = rows["first"][0]
    for name in ("events", "anchors"):
        rows[name][1] += rows[name][0]
    return rows[1:]


def build(store: EventStore, folder: Path, source: IndexSource, chunk: int = _CHUNK) -> None:
    """Write the index of a store into an empty folder."""
    seconds, anchors = source.seconds, anchor_range(store, source.min_history)
    windows = anchors.windows(seconds)
    if windows > MOST_WINDOWS:
        raise ConfigError(
            f"window.seconds is {seconds:,}, which gives {windows:,} windows; the maximum is {MOST_WINDOWS:,}",
            where={"field": "window.seconds"},
            fix="choose a longer window",
        )
    count_W, total = np.zeros(windows, np.int64), 0
    draft = folder / _DRAFT
    with writing(draft, fix=_FIX), draft.open("wb") as file:
        for rows in rows_by_user(store, anchors, seconds, chunk):
            poll()
            np.add.at(count_W, rows["window"], 1)
            total += int(rows["anchors"].sum(dtype=np.int64))
            file.write(rows.tobytes())
    offsets_W1 = np.concatenate([[0], np.cumsum(count_W)])
    with writing(folder, fix=_FIX):
        _scatter(draft, folder, offsets_W1, chunk)
        draft.unlink()
    manifest = IndexManifest(
        **as_json(source),
        t_min=anchors.t_min,
        t_max=anchors.t_max,
        windows=windows,
        rows=int(offsets_W1[-1]),
        anchors=total,
        digest_block=DIGEST_BLOCK,
        columns={name: _described(folder / name) for name in COLUMNS},
    )
    write_json(folder / MANIFEST, sealed(manifest))


def _described(path: Path) -> StoredColumn:
    with path.open("rb") as file:
        blocks = [hashlib.sha256(block).hexdigest() for block in iter(lambda: file.read(DIGEST_BLOCK), b"")]
    return StoredColumn(bytes=path.stat().st_size, blocks=blocks)


def _scatter(draft: Path, folder: Path, offsets_W1: NDArray[np.int64], chunk: int) -> None:
    """A counting sort: rows by user to columns by window."""
    rows_R, next_W = int(offsets_W1[-1]), offsets_W1[:-1].copy()
    key = np.uint16 if len(next_W) <= 1 << 16 else np.uint32
    columns = {name: _mapped(folder / name, kind, rows_R) for name, kind in ROW_COLUMNS.items()}
    with draft.open("rb") as file:
        while len(rows := np.frombuffer(file.read(chunk * _ROW.itemsize), _ROW)):
            poll()
            # numpy sorts 16-bit keys by radix, which is fast.
            order = np.argsort(rows["window"].astype(key), kind="stable")
            window = rows["window"][order]
            begins = np.flatnonzero(np.diff(window, prepend=np.uint32(window[0] + 1)))
            lengths = np.diff(begins, append=len(window))
            target = np.arange(len(window)) + np.repeat(next_W[window[begins]] - begins, lengths)
            next_W[window[begins]] += lengths
            for name, column in columns.items():
                column[target] = rows[name][order]
    offsets = _mapped(folder / OFFSETS, COLUMNS[OFFSETS], len(offsets_W1))
    offsets[:] = offsets_W1
    del columns, offsets
    for name in COLUMNS:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


def _mapped(path: Path, kind: str, length: int) -> NDArray[Any]:
    bytes_ = length * np.dtype(kind).itemsize
    with path.open("w+b") as file:
        # Allocate now: on a full disk, writing to a mapped hole would kill the process without a message.
        os.posix_fallocate(file.fileno(), 0, bytes_)
        return np.frombuffer(mmap.mmap(file.fileno(), bytes_), kind)
