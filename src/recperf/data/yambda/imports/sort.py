"""Events in the order of a file to the order of a store, with the disk where memory does not reach.

Every event becomes a record of fixed width. When all are written it is known how many each user has, so the users are
cut into ranges that fit into memory, records are dealt to the ranges, and each range is sorted by itself.

Shapes: N records, C codes of users, R the same by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ....errors import DataError, MachineError
from ....files import writing
from ..writer import StoreWriter

RECORD = np.dtype([("user", "<u4"), ("item", "<u4"), ("time", "<u4"), ("kind", "u1"), ("ratio", "<u2")])
EVENT_COST = 100
"""Bytes of memory an event takes while it is sorted."""
_STRIDE = 1 << 20

Records = NDArray[np.void]


class Spool:
    """Records in the order of the file, and how many each user has."""

    def __init__(self, folder: Path, *, fix: str) -> None:
        self.folder, self.fix = folder, fix
        self.path = folder / "events"
        self.events = 0
        self._counts = np.zeros(0, np.int64)

    def __enter__(self) -> Spool:
        with writing(self.path, fix=self.fix):
            self.folder.mkdir()
            self._file = self.path.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            with writing(self.path, fix=self.fix):
                self._file.close()
        except MachineError:
            # The error that led here says more than that its rest could not be written either.
            if error is None:
                raise

    def append(self, records_N: Records) -> None:
        counts = np.bincount(records_N["user"])
        if len(counts) > len(self._counts):
            room = max(len(counts), 2 * len(self._counts)) - len(self._counts)
            self._counts = np.append(self._counts, np.zeros(room, np.int64))
        self._counts[: len(counts)] += counts
        self.events += len(records_N)
        with writing(self.path, fix=self.fix):
            self._file.write(records_N.tobytes())

    def counts(self, users: int) -> NDArray[np.int64]:
        return self._counts[:users]


def write_sorted(
    spool: Spool,
    writer: StoreWriter,
    *,
    users_C: NDArray[np.uint32],
    items: NDArray[np.uint32],
    memory: int,
    progress: Callable[[int, int], None],
) -> int:
    """Append all events by user, time and place in the file. `users_C` and `items` turn codes into ids.

    Answers with how many events were earlier than the one before them of the same user.
    """
    order_R = np.argsort(users_C)
    rank_C = np.empty(len(users_C), np.uint32)
    rank_C[order_R] = np.arange(len(users_C), dtype=np.uint32)
    counts_R = spool.counts(len(users_C))[order_R]
    ranges = _ranges(counts_R, max(1, memory // 2 // EVENT_COST), memory)
    late = done = 0
    progress(done, spool.events)
    for path in _dealt(spool, rank_C, ranges):
        with writing(path, fix=spool.fix):
            records_N = np.fromfile(path, RECORD)
            path.unlink()
        order_N, late_here = _order(rank_C[records_N["user"]], records_N["time"])
        late += late_here
        for start in range(0, len(order_N), _STRIDE):
            part = records_N[order_N[start : start + _STRIDE]]
            writer.append(
                uids=users_C[part["user"]],
                items=items[part["item"]],
                times=part["time"],
                kinds=part["kind"],
                ratios=part["ratio"],
            )
        done += len(records_N)
        progress(done, spool.events)
    return late


def _ranges(counts_R: NDArray[np.int64], most: int, memory: int) -> NDArray[np.int64]:
    """First ranks of ranges of users with at most `most` events each."""
    ends_R = np.cumsum(counts_R)
    largest = int(counts_R.max())
    if largest > most:
        needed = -(-largest * EVENT_COST * 2 // (1 << 20))
        raise DataError(
            f"one user has {largest:,} events, too many to sort in {memory >> 20:,} MiB",
            fix=f"--memory-mib {needed + 1}; or is the user column another one?",
        )
    firsts = [0]
    while (end := int(np.searchsorted(ends_R, ends_R[firsts[-1]] - counts_R[firsts[-1]] + most, "right"))) < len(
        ends_R
    ):
        firsts.append(end)
    return np.array(firsts)


def _dealt(spool: Spool, rank_C: NDArray[np.uint32], firsts: NDArray[np.int64]) -> Iterator[Path]:
    """A file of records for each range of users, still in the order of the file."""
    if len(firsts) == 1:
        yield spool.path
        return
    paths = [spool.folder / f"range-{index}" for index in range(len(firsts))]
    with spool.path.open("rb") as file:
        while len(records_N := np.fromfile(file, RECORD, _STRIDE)):
            range_N = np.searchsorted(firsts, rank_C[records_N["user"]], "right") - 1
            order_N = np.argsort(range_N, kind="stable")
            starts = np.searchsorted(range_N[order_N], np.arange(len(firsts) + 1))
            for index in np.flatnonzero(np.diff(starts)):
                part = records_N[order_N[starts[index] : starts[index + 1]]]
                # Opened for each piece: there can be more ranges than a process may hold files.
                with writing(paths[index], fix=spool.fix), paths[index].open("ab") as out:
                    out.write(part.tobytes())
    spool.path.unlink()
    yield from paths


def _order(ranks_N: NDArray[np.uint32], times_N: NDArray[np.uint32]) -> tuple[NDArray[np.int64], int]:
    """The stable order by user and time, and how many events came before an earlier one of the same user."""
    order_N = np.argsort(ranks_N, kind="stable")
    keys_N = ranks_N[order_N].astype(np.uint64) << np.uint64(32) | times_N[order_N]
    late = int(np.count_nonzero(keys_N[1:] < keys_N[:-1]))
    if late:
        order_N = order_N[np.argsort(keys_N, kind="stable")]
    return order_N, late
