"""Random rows of a store that does not fit any cache, in host memory and in files, against numpy in the same run.

A row is that of the published dlrm-v4, 512 weights and one number of the optimizer; a call moves as many as one of its
batches has distinct items. In memory the peers are `take` and an assignment by index. In files it is `take` from a
mapped file of plain rows, without checksums: warm, where the kernel has all of the file in its memory, and cold, where
it has none of it. Ways take turns, and what they read is compared.

Run as `python benchmarks/row_store.py [--gib N] [--folder F] [--no-record]`. The folder is on the disk to be measured.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from _rows import record, row, show
from recperf.models.tiers.store import FileRows, HostRows, RowStore, Values

WIDTH, CALL, ROUNDS = 513, 65_536, 5


class Mapped:
    """Plain rows in a mapped file."""

    def __init__(self, path: Path, rows: int) -> None:
        self.file = path.open("w+b")
        self.file.truncate(4 * rows * WIDTH)
        self.memory = mmap.mmap(self.file.fileno(), 0)
        self.memory.madvise(mmap.MADV_RANDOM)
        self.table_RW = np.frombuffer(self.memory, np.float32).reshape(rows, WIDTH)

    def forget(self) -> None:
        self.memory.flush()
        self.memory.madvise(mmap.MADV_DONTNEED)
        forget(self.file.fileno())


def forget(handle: int) -> None:
    """Make the kernel drop the file from its memory."""
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def fill(store: RowStore, table_RW: Values | None = None) -> None:
    draw = np.random.default_rng(1)
    for first in range(0, store.rows, CALL):
        rows_N = np.arange(first, min(first + CALL, store.rows))
        values_NW = draw.standard_normal((len(rows_N), WIDTH), np.float32)
        store.write(rows_N, values_NW)
        if table_RW is not None:
            table_RW[rows_N] = values_NW


def timed(work: Callable[[], object], size: int) -> tuple[float, float]:
    """Gigabytes a second, and a second of one core."""
    began, worked = perf_counter(), process_time()
    work()
    return size / 1e9 / (perf_counter() - began), size / 1e9 / (process_time() - worked)


def measured(place: str, store: RowStore, table_RW: Values, forgetting: Callable[[], None]) -> list[dict[str, Any]]:
    """Rates of reading and writing rows of a store, and of the same rows of an array that holds the same."""
    draw = np.random.default_rng(2)
    ours_NW, theirs_NW = (np.zeros((CALL, WIDTH), np.float32) for _ in range(2))
    rates: dict[str, list[tuple[float, float]]] = {}
    for number in range(ROUNDS + 1):
        rows_N = draw.choice(store.rows, CALL, replace=False)
        ways: dict[str, Callable[[], object]] = {
            "recperf, read": lambda: store.read(rows_N, ours_NW),  # noqa: B023
            "numpy, read": lambda: np.take(table_RW, rows_N, axis=0, out=theirs_NW, mode="clip"),  # noqa: B023
            "recperf, write": lambda: store.write(rows_N, ours_NW),  # noqa: B023
            "numpy, write": lambda: table_RW.__setitem__(rows_N, theirs_NW),  # noqa: B023
        }
        for name, work in ways.items():
            forgetting()
            rate = timed(work, ours_NW.nbytes)
            if number:
                rates.setdefault(name, []).append(rate)
            if name == "numpy, read" and not np.array_equal(ours_NW, theirs_NW):
                sys.exit(f"{place}: the rows differ")
    rows = []
    for name, pairs in rates.items():
        way, _, does = name.partition(", ")
        conditions = {
            "rows": store.rows,
            "width": WIDTH,
            "call": CALL,
            "load": os.getloadavg()[0],
            "per_core_second": round(float(np.median([rate for _, rate in pairs])), 3),
        }
        rows.append(row("row_store", f"{way}, {place}", does, "GB/s", [rate for rate, _ in pairs], conditions))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the store")
    parser.add_argument("--folder", type=Path, help="where the files lie; by default a temporary folder")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    rows = max(CALL, int(options.gib * (1 << 30)) // (4 * WIDTH))
    host = HostRows(rows, WIDTH)
    fill(host)
    entries = measured("memory", host, host._table_RW, lambda: None)
    host.close()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        files, mapped = FileRows(Path(folder), {"item": rows}, WIDTH), Mapped(Path(folder) / "mapped", rows)
        fill(files, mapped.table_RW)

        def forgetting() -> None:
            mapped.forget()
            forget(files._files.handles[0])

        entries += measured("warm file", files, mapped.table_RW, lambda: None)
        entries += measured("cold file", files, mapped.table_RW, forgetting)
        files.close()
    for entry in entries:
        print(show(entry), f"{entry['conditions']['per_core_second']} GB per core-second")
    if not options.no_record:
        print(f"rows appended to {record(entries).name}")


if __name__ == "__main__":
    main()
