"""Raw Yambda to an event store: one pass over the file, in bounded memory.

The split by time needs the last timestamp, which comes from the statistics of the file. Only training events go into
the store. The bookmark holds all state of the pass, so that it can resume after any interruption.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ... import units
from ...errors import DataError, MachineError
from ...files import sha256
from ...jsonfile import Struct, require
from .manifest import Manifest
from .raw import CHUNK_ROWS, Chunk, RawEvents, RawFiles, catalogue, identity_of
from .schema import GAP_MINUTES, LICENCE, TEST_DAYS, TRAIN_DAYS, Split, split_of
from .store import EVENT_BYTES, kinds_of
from .writer import JOURNAL, StoreWriter, finished

COMMIT_ROWS = 1 << 24
"""Rows between two commits: the most work that a killed process loses."""
ROOM_SHARE = 0.9
"""A disk with less than this share of the space that the events may need is refused at the start."""
LEFT_OUT = ("test_events", "test_events_of_unknown_users", "dropped_before", "dropped_gap", "dropped_last")


class Pass(Struct, kw_only=True):
    """How far the pass over the file has come."""

    row: int = 0
    last: tuple[int, int] | None = None
    """User and time of the last row."""
    t_min: int = 1 << 32
    t_max: int = -1
    counts: dict[str, int]
    """Events that are not in the store, by the names in LEFT_OUT."""


def prepare(
    files: RawFiles,
    folder: Path,
    *,
    name: str,
    progress: Callable[[int, int], None] = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the store of these files, or resume it.

    `progress` receives the rows done and the total; `say` receives a message if an unfinished store is discarded.
    """
    identity = source_identity(files)
    if finished(folder, identity):
        return folder.expanduser()
    catalogue_I2 = catalogue(files.artists, files.albums)
    raw = RawEvents(files.events, len(catalogue_I2))
    t_min, t_max = raw.time_range()
    split = split_of(t_max)
    if t_min >= split.train_end:
        raise DataError(
            f"there is no training event: the stream spans {t_max - t_min:,} s, and its last "
            f"{split.test_end - split.train_end:,} s are reserved for the test",
            where={"file": files.events},
            fix="recperf data import reads short streams without this split",
        )
    with StoreWriter(folder, identity=identity) as writer:
        if writer.discarded:
            say("the unfinished store here has another source or version: it is discarded, and preparing starts over")
        state = _append_all(writer, raw, split, progress)
        if (state.t_min, state.t_max) != (t_min, t_max):
            raise DataError(
                f"the event file's statistics give times {t_min:,} to {t_max:,}, but its rows have {state.t_min:,} "
                f"to {state.t_max:,}",
                where={"file": files.events},
                fix="write the file again without statistics",
            )
        if source_identity(files) != identity:
            what = "the raw files changed while they were read"
            raise DataError(what, where={"file": files.events}, fix="prepare them when they are complete")
        counts = {"raw_events": raw.rows, "train_events": writer.events, **state.counts}
        manifest = Manifest(
            name=name,
            size=files.size,
            synthetic=False,
            licence=LICENCE,
            split={"t_min": t_min, "t_max": t_max, **vars(split), **counts},
        )
        return writer.finish(catalogue_I2, manifest)


def source_identity(files: RawFiles) -> dict[str, object]:
    """Facts that identify the source of a store."""
    for path in (files.artists, files.albums):
        if not path.is_file():
            raise DataError("the file is missing", where={"file": path}, fix="recperf data get --help")
    return {
        "kind": "yambda",
        "split": [TRAIN_DAYS, GAP_MINUTES, TEST_DAYS],
        "events": identity_of(files.events),
        # The maps are small enough for a digest of their whole content.
        "artists": sha256(files.artists),
        "albums": sha256(files.albums),
    }


def _append_all(writer: StoreWriter, raw: RawEvents, split: Split, progress: Callable[[int, int], None]) -> Pass:
    """Append the training events from the last commit on. Returns the final state of the pass."""
    state = Pass(counts=dict.fromkeys(LEFT_OUT, 0))
    if writer.bookmark:
        state = require(writer.bookmark, Pass, writer.draft / JOURNAL, what="is damaged", at="bookmark")
    # Refuse a disk that is too small before hours of work, not after.
    needed, free = (raw.rows - state.row) * EVENT_BYTES, shutil.disk_usage(writer.draft).free
    if free < needed * ROOM_SHARE:
        raise MachineError(
            f"the disk has {units.size(free)} free; the store needs about {units.size(needed)} more",
            where={"folder": writer.draft},
            fix="free some space, or choose another place with --store",
        )
    committed = state.row
    for chunk in raw.chunks(committed, CHUNK_ROWS, after=state.last):
        _append(writer, chunk, split, state.counts)
        state.row += len(chunk)
        state.last = int(chunk.uids[-1]), int(chunk.times[-1])
        state.t_min = min(state.t_min, int(chunk.times.min()))
        state.t_max = max(state.t_max, int(chunk.times.max()))
        progress(state.row, raw.rows)
        if state.row - committed >= COMMIT_ROWS:
            writer.commit(state)
            committed = state.row
    writer.commit(state)
    return state


def _append(writer: StoreWriter, chunk: Chunk, split: Split, counts: dict[str, int]) -> None:
    """Append the training events of a chunk and count the others."""
    times = chunk.times.astype(np.int64)
    train = (times >= split.train_start) & (times < split.train_end)
    uids = chunk.uids[train]
    if len(uids) < len(chunk):
        test = (times >= split.test_start) & (times < split.test_end)
        known = int(np.isin(chunk.uids[test], np.append(uids, writer.state.last_user)).sum())
        counts["test_events"] += known
        counts["test_events_of_unknown_users"] += int(test.sum()) - known
        counts["dropped_before"] += int((times < split.train_start).sum())
        counts["dropped_gap"] += int(((times >= split.train_end) & (times < split.test_start)).sum())
        counts["dropped_last"] += int((times >= split.test_end).sum())
    writer.append(
        uids=uids,
        items=chunk.items[train],
        times=chunk.times[train],
        kinds=kinds_of(chunk.types[train], chunk.ratios[train], chunk.organic[train]),
    )
