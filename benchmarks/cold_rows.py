"""What a cold row of micro-dlrm-dram's table costs, and why: by implementation, prefetching, pages and table size.

The matched pair compares lookups of ids whose rows stay in a cache (hot) with those of the whole table (cold). This
script looks up random rows of 1 KiB outside any step, with recperf's C bag, the same without its prefetching, and the
gathers of torch and numpy: in tables of 512 MiB and 2 GB, on 4 KiB and on huge pages. The hot rows lie anywhere in the
table. The lowest of the short readings counts, since other work only adds to them; all are in the rows. With
one thread its CPU clock is read, which does not count while other work has the core.

Run as `python benchmarks/cold_rows.py [--threads N] [--no-record]`. With --no-record it needs only torch and numpy, and
prints one JSON line at its end.
"""

from __future__ import annotations

import json
import mmap
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recperf.machine import host_facts
from recperf.ops import compile as compiling
from recperf.ops.bag import native

DIM, BAG, LOOKUPS, READINGS = 256, 32, 8192, 40
ROWS = (512 * 1024, 2_000_000)
HOT = 510
NO_PREFETCH = "-D__builtin_prefetch(...)=((void)0)"


def new_table(rows: int, *, huge: bool) -> Tensor:
    # Shared memory, which is the default, has no huge pages.
    memory = mmap.mmap(-1, 4 * rows * DIM, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(rows, DIM).fill_(1.0)


def huge_share(table: Tensor) -> float:
    """The part of a table that the system holds in huge pages."""
    inside = mapped = huge = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(place, 16) for place in first.split("-"))
            inside = begin <= table.data_ptr() + table.nbytes // 2 < end
        elif inside and first in ("Rss:", "AnonHugePages:"):
            kib = int(rest.split()[0])
            mapped, huge = (kib, huge) if first == "Rss:" else (mapped, kib)
    return huge / mapped if mapped else 0.0


def without_prefetch() -> Callable[[Tensor, Tensor, Tensor], object]:
    """The C bag, compiled with prefetches that do nothing."""
    compiling.extra_flags = (NO_PREFETCH,)
    library = compiling.usable(compiling.load(Path(native.__file__).with_name("native.c"), native._FUNCTIONS))
    compiling.extra_flags = ()

    def bag_sum(table: Tensor, ids: Tensor, offsets: Tensor) -> object:
        out = torch.empty(len(offsets) - 1, DIM)
        places = table.data_ptr(), ids.data_ptr(), offsets.data_ptr(), out.data_ptr()
        cuts = compiling.even_cuts(len(offsets) - 1, torch.get_num_threads())
        compiling.share(lambda first, last: library.bag_sum(*places, first, last, DIM), cuts)
        return out

    return bag_sum


def methods(table: Tensor, ids: Tensor, plain_bag: Callable[..., object]) -> dict[str, Callable[[], object]]:
    offsets, out = torch.arange(0, LOOKUPS + 1, BAG), torch.ones(LOOKUPS, DIM)
    table_N, ids_N, out_N = table.numpy(), ids.numpy(), out.numpy()
    return {
        "recperf": lambda: native.bag_sum(table, ids, offsets),
        "recperf, no prefetch": lambda: plain_bag(table, ids, offsets),
        "embedding_bag": lambda: F.embedding_bag(ids, table, offsets, mode="sum", include_last_offset=True),
        "index_select": lambda: torch.index_select(table, 0, ids, out=out),
        "numpy.take, one thread": lambda: table_N.take(ids_N, axis=0, out=out_N, mode="clip"),
    }


def readings(table: Tensor, rows: int, plain_bag: Callable[..., object]) -> dict[str, list[float]]:
    """ns a row by method, of rows that are drawn anew for each reading."""
    generator, ids = torch.Generator().manual_seed(0), torch.zeros(LOOKUPS, dtype=torch.int64)
    places = torch.randperm(len(table), generator=generator)[:rows]
    clock = thread_time_ns if torch.get_num_threads() == 1 else perf_counter_ns
    taken: dict[str, list[float]] = {}
    for name, work in methods(table, ids, plain_bag).items():
        taken[name] = []
        for _ in range(READINGS):
            ids.copy_(places[torch.randint(rows, (LOOKUPS,), generator=generator)])
            began = clock()
            work()
            taken[name].append((clock() - began) / LOOKUPS)
    return taken


def main() -> int:
    words = sys.argv[1:]
    if "--threads" in words:
        torch.set_num_threads(int(words[words.index("--threads") + 1]))
    plain_bag = without_prefetch()
    facts, entries = host_facts(), []
    print(f"{facts['cpu'] or platform.machine()}, {torch.get_num_threads()} threads, rows of {4 * DIM} bytes; ns a row")
    for rows in ROWS:
        for pages in ("huge", "4 KiB"):
            table = new_table(rows, huge=pages == "huge")
            share = huge_share(table)
            print(f"{table.nbytes / 1e9:.2f} GB, {pages} pages ({share:.0%} of the table in huge ones)")
            hot, cold = (readings(table, count, plain_bag) for count in (HOT, rows))
            for name in cold:
                near, far = min(hot[name]), min(cold[name])
                middle = float(np.median(cold[name]) / np.median(hot[name]))
                print(f"  {name:<24} hot {near:7.1f}  cold {far:7.1f}  {far / near:5.2f} times (medians {middle:.2f})")
                entries.append((name, rows, pages, share, hot[name], cold[name]))
            del table
    if "--no-record" not in words:
        from _rows import record, row

        made = []
        for name, rows, pages, share, near_ns, far_ns in entries:
            conditions: dict[str, Any] = {"rows": rows, "pages": pages, "huge_share": share, "dim": DIM, "hot": HOT}
            conditions |= {"threads": torch.get_num_threads(), "lookups": LOOKUPS}
            for metric, values in (("hot", near_ns), ("cold", far_ns)):
                made.append(row("cold_rows", name, metric, "ns a row", values, {**conditions, "least": min(values)}))
        print(f"rows appended to {record(made).name}")
        return 0
    least = [
        (name, rows, pages, round(min(hot), 1), round(min(cold), 1)) for name, rows, pages, _, hot, cold in entries
    ]
    print(json.dumps({"cpu": facts["cpu"], "threads": torch.get_num_threads(), "least_ns": least}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
