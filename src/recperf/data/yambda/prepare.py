"""From raw Yambda to an event store: one pass over the file, in memory that a setting bounds.

The split in time needs the last timestamp first; it is taken from the file's statistics. Only train events go to the
store. What the pass needs besides its own piece of the file is in the bookmark, so that it can be stopped anywhere.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import units
from ...errors import DataError, MachineError, UsageError
from ...files import sha256
from .maps import catalogue
from .raw import Chunk, RawEvents, RawFiles, identity_of, require_known
from .schema import DAY_S, GAP_MINUTES, LICENCE, MADE_UP_KEY, MADE_UP_LICENCE, TEST_DAYS, TRAIN_DAYS
from .store import EVENT_BYTES, kinds_of
from .writer import StoreWriter, finished

COMMIT_ROWS = 1 << 24
"""Rows between two commits: what a kill costs at most."""
MOST_ROWS, LEAST_ROWS = 1 << 20, 1 << 14
"""Rows of a piece; longer ones are not faster."""
FIXED_BYTES = 224 << 20
"""What python, its libraries and the reader's buffers take whatever the piece."""
ROW_BYTES = 220
"""What a row of a piece takes at most, between its decoded columns, masks and copies."""
ROOM_SHARE = 0.9
"""A disk that has less than this share of the room the events may need is refused before the work."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The split in time: train is [train_start, train_end), test is [test_start, test_end)."""

    train_start: int
    train_end: int
    test_start: int
    test_end: int


def split_of(t_max: int) -> Split:
    """The split of a stream whose last event is at `t_max`, as the benchmark cuts it."""
    test_start = t_max - TEST_DAYS * DAY_S
    train_end = test_start - GAP_MINUTES * 60
    return Split(train_start=train_end - TRAIN_DAYS * DAY_S, train_end=train_end, test_start=test_start, test_end=t_max)


def prepare(
    files: RawFiles,
    folder: Path,
    *,
    name: str,
    memory: int = 1 << 30,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Write the store of these files, or go on with it. `memory` bounds what the whole process keeps resident.

    `progress` is told rows done and rows in all; `say` gets a sentence when something begun before is thrown away.
    """
    identity = source_identity(files)
    if finished(folder, identity):
        return folder.expanduser()
    raw = RawEvents(files.events)
    catalogue_I2 = catalogue(files.artists, files.albums)
    rows = piece_rows(memory, catalogue_I2.nbytes)
    t_min, t_max = raw.time_range()
    split = split_of(t_max)
    if t_min >= split.train_end:
        raise DataError(
            f"there is no event to train on: the stream spans {t_max - t_min:,} s, and its last "
            f"{split.test_end - split.train_end:,} s are set aside",
            where={"file": files.events},
            fix="recperf data import brings in short streams without this split",
        )
    with StoreWriter(folder, identity=identity) as writer:
        if writer.anew and say:
            say("what was begun here is of another source or version: it is thrown away, and preparing begins anew")
        tally = _Tally(writer.bookmark)
        _require_room(writer, raw.rows - tally.row)
        for chunk in _committed(raw, rows, tally, writer):
            _append(writer, chunk, split, len(catalogue_I2), tally, files)
            tally.pass_over(chunk)
            if progress:
                progress(tally.row, raw.rows)
        if (tally.t_min, tally.t_max) != (t_min, t_max):
            raise DataError(
                f"the event file's statistics say times {t_min:,} to {t_max:,}; its rows have {tally.t_min:,} to "
                f"{tally.t_max:,}",
                where={"file": files.events},
                fix="write the file again without statistics",
            )
        made_up = MADE_UP_KEY in raw.notes
        counts = {"raw_events": raw.rows, "train_events": writer.events, **tally.counts}
        return writer.finish(
            catalogue_I2,
            {
                "name": name,
                "size": files.size,
                "synthetic": made_up,
                "licence": MADE_UP_LICENCE if made_up else LICENCE,
                "split": {"t_min": t_min, "t_max": t_max, **asdict(split), **counts},
            },
        )


def source_identity(files: RawFiles) -> dict[str, Any]:
    """What a store of these files is recognised by."""
    for path in (files.artists, files.albums):
        if not path.is_file():
            raise DataError("the file is missing", where={"file": path}, fix="recperf data get --help")
    return {
        "kind": "yambda",
        "split": [TRAIN_DAYS, GAP_MINUTES, TEST_DAYS],
        "events": identity_of(files.events),
        # The maps are small enough to be told apart by all they hold.
        "artists": sha256(files.artists),
        "albums": sha256(files.albums),
    }


def piece_rows(memory: int, catalogue_bytes: int) -> int:
    """Rows read at a time so that the process stays within `memory` bytes."""
    fixed = FIXED_BYTES + 2 * catalogue_bytes
    rows = min(MOST_ROWS, (memory - fixed) // ROW_BYTES)
    if rows < LEAST_ROWS:
        least = -(-(fixed + LEAST_ROWS * ROW_BYTES) >> 20)
        raise UsageError(
            f"{units.size(memory)} of memory are too little to prepare this", fix=f"allow at least {least:,} MiB"
        )
    return rows


class _Tally:
    """Where the pass is, and what it has left out so far."""

    def __init__(self, bookmark: dict[str, Any] | None) -> None:
        kept = bookmark or {}
        self.row: int = kept.get("row", 0)
        self.last: list[int] | None = kept.get("last")
        self.t_min: int = kept.get("t_min", 1 << 32)
        self.t_max: int = kept.get("t_max", -1)
        names = ("test_events", "test_events_of_unknown_users", "dropped_before", "dropped_gap", "dropped_last")
        self.counts: dict[str, int] = kept.get("counts", dict.fromkeys(names, 0))

    def bookmark(self) -> dict[str, Any]:
        return {
            "row": self.row, "last": self.last, "t_min": self.t_min, "t_max": self.t_max, "counts": dict(self.counts)
        }  # fmt: skip

    def pass_over(self, chunk: Chunk) -> None:
        self.row += len(chunk)
        self.last = [int(chunk.uids[-1]), int(chunk.times[-1])]
        self.t_min = min(self.t_min, int(chunk.times.min()))
        self.t_max = max(self.t_max, int(chunk.times.max()))

    def leave_out(self, uids: NDArray[np.uint32], times: NDArray[np.int64], split: Split, known: NDArray[Any]) -> None:
        """Count events that do not train. `known` are users that do, ascending."""
        test = (times >= split.test_start) & (times < split.test_end)
        of_known = int(np.isin(uids[test], known).sum())
        self.counts["test_events"] += of_known
        self.counts["test_events_of_unknown_users"] += int(test.sum()) - of_known
        self.counts["dropped_before"] += int((times < split.train_start).sum())
        self.counts["dropped_gap"] += int(((times >= split.train_end) & (times < split.test_start)).sum())
        self.counts["dropped_last"] += int((times >= split.test_end).sum())


def _committed(raw: RawEvents, rows: int, tally: _Tally, writer: StoreWriter) -> Iterator[Chunk]:
    """Pieces of the file, with a commit whenever enough of them have passed and at the end."""
    after = (tally.last[0], tally.last[1]) if tally.last else None
    safe = tally.row
    for chunk in raw.chunks(tally.row, rows, after=after, lengths=False):
        yield chunk
        if tally.row - safe >= COMMIT_ROWS:
            writer.commit(tally.bookmark())
            safe = tally.row
    writer.commit(tally.bookmark())


def _append(writer: StoreWriter, chunk: Chunk, split: Split, items: int, tally: _Tally, files: RawFiles) -> None:
    require_known(chunk, items, files)
    times = chunk.times.astype(np.int64)
    train = (times >= split.train_start) & (times < split.train_end)
    uids = chunk.uids[train]
    if len(uids) < len(chunk):
        known = np.unique(np.append(uids, writer.last_user))
        tally.leave_out(chunk.uids[~train], times[~train], split, known)
    writer.append(
        uids=uids,
        items=chunk.items[train],
        times=chunk.times[train],
        kinds=kinds_of(chunk.types[train], chunk.ratios[train], chunk.organic[train]),
        ratios=chunk.ratios[train],
    )


def _require_room(writer: StoreWriter, rows: int) -> None:
    """Refuse a disk that will be full, before hours of work and not after."""
    needed, free = rows * EVENT_BYTES, shutil.disk_usage(writer.draft).free
    if free < needed * ROOM_SHARE:
        raise MachineError(
            f"the disk has {units.size(free)} free; the store needs about {units.size(needed)} more",
            where={"folder": writer.draft},
            fix="free some space, or choose another place with --store",
        )
