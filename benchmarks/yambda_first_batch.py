"""How long training on a prepared store waits: for its first batch, and at a change of windows.

The store is made up, 60M events with the statistics of Yambda. The first batch is timed by the parent's clock from
before a fresh Python process is started, so that its imports count: opening the store, building the index of windows
or reading it, and gathering 1,024 histories of up to 4,086 events. "cold" has the store's files taken out of the memory
the system keeps of the disk, as far as it lets go of them.

Then a consumer takes batches and pauses 100 ms after each, as one that trains, over several changes of windows. Its
wait for the first batch of a window is held against its waits for the others. What finding a window's anchors takes,
which would be the wait if nobody looked ahead, is timed alone.

Run as `python benchmarks/yambda_first_batch.py [--events N] [--store FOLDER]`; a store given is made there once and
kept. Rows are recorded at the full size only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, perf_counter, process_time, sleep
from typing import Any

EVENTS, BATCH, ROUNDS = 60_000_000, 1024, 3
PAUSE_S, CHANGES, WORKERS, PREFETCH = 0.1, 4, 2, 4
PARTS = {"total": "first batch", "busy": "processor time", "imports": "imports", "index": "index"}
"""Processor time, of all threads, shows what other programs' share of the machine was."""
MOST_S = 5.0
"""What the first batch may take, in the worst of the rounds."""
MOST_STALL_MS = 20.0
"""What a change of windows may add to twice the usual wait."""


def first_batch(folder: Path, began: float) -> dict[str, Any]:
    """From nothing to a batch, as a training process would."""
    from recperf.data.yambda.config import HistoryConfig, WindowConfig
    from recperf.data.yambda.history import Histories
    from recperf.data.yambda.loader import Loader
    from recperf.data.yambda.order import StreamOrder
    from recperf.data.yambda.store import open_store
    from recperf.data.yambda.windows import WindowIndex

    imported = monotonic()
    store = open_store(folder)
    index = WindowIndex.open(store, WindowConfig())
    indexed = monotonic()
    order = StreamOrder(index, windows=range(index.windows - 1), batch_size=BATCH)
    with Loader(order, Histories(store, HistoryConfig()), workers=WORKERS, prefetch=PREFETCH) as loader:
        batch = next(iter(loader))
        total, busy = monotonic() - began, process_time()
    return {
        "total": total,
        "busy": busy,
        "imports": imported - began,
        "index": indexed - imported,
        "batches": len(order),
        "mean_length": len(batch.times_T) / len(batch),
    }


def waits(folder: Path) -> dict[str, Any]:
    """Waits of a consumer, by whether a batch is the first of its window."""
    from recperf.data.yambda.config import HistoryConfig, WindowConfig
    from recperf.data.yambda.history import Histories
    from recperf.data.yambda.loader import Loader
    from recperf.data.yambda.order import StreamOrder
    from recperf.data.yambda.store import open_store
    from recperf.data.yambda.windows import WindowIndex

    store = open_store(folder)
    index = WindowIndex.open(store, WindowConfig())
    first = int(index.counts().argmax())
    windows = range(max(0, first - CHANGES), max(0, first - CHANGES) + CHANGES + 1)
    order = StreamOrder(index, windows=windows, batch_size=BATCH)
    found: dict[str, list[float]] = {"usual": [], "change": [], "lookup": []}
    for window in windows:
        began = perf_counter()
        index.order(window, "train")
        found["lookup"].append((perf_counter() - began) * 1e3)
    with Loader(order, Histories(store, HistoryConfig()), workers=WORKERS, prefetch=PREFETCH) as loader:
        stream, place = iter(loader), order.last_place(0)
        for number in range(len(order)):
            began = perf_counter()
            next(stream)
            waited = (perf_counter() - began) * 1e3
            changed, place = order.last_place(number) != place, order.last_place(number)
            if number >= PREFETCH:
                found["change" if changed else "usual"].append(waited)
            sleep(PAUSE_S)
    return {**found, "anchors": [int(count) for count in order.counts_S], "batches": len(order)}


def child(what: str, folder: Path) -> Any:
    """One part of the measurement in a process of its own."""
    command = [sys.executable, __file__, "--child", what, "--store", str(folder), "--began", repr(monotonic())]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def forget(folder: Path) -> None:
    """Ask the system to drop what it keeps of a folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(folder: Path) -> list[dict[str, Any]]:
    from _rows import row
    from recperf.data.yambda.store import open_store

    events = open_store(folder).events
    facts = {"events": events, "batch": BATCH, "workers": WORKERS, "prefetch": PREFETCH, "load": os.getloadavg()[0]}
    entries = []
    for variant, build, cold in (
        ("index to build", True, False),
        ("index to build, cold", True, True),
        ("index there", False, False),
        ("index there, cold", False, True),
    ):
        rounds = []
        for _ in range(ROUNDS):
            if build:
                shutil.rmtree(folder / "windows", ignore_errors=True)
            if cold:
                forget(folder)
            rounds.append(child("first", folder))
        conditions = facts | {name: round(rounds[0][name], 1) for name in ("batches", "mean_length")}
        for part, metric in PARTS.items():
            values = [one[part] for one in rounds]
            longest = conditions | {"longest_s": max(values)}
            entries.append(row("yambda_first_batch", variant, metric, "s", values, longest))
    found = child("waits", folder)
    conditions = facts | {"pause_s": PAUSE_S, "batches": found["batches"], "anchors": found["anchors"]}
    for variant, metric, part in (
        ("usual batch", "wait", "usual"),
        ("change of windows", "wait", "change"),
        ("finding a window", "lookup", "lookup"),
    ):
        longest = conditions | {"longest_ms": max(found[part])}
        entries.append(row("yambda_first_batch", variant, metric, "ms", found[part], longest))
    return entries


def missed(entries: list[dict[str, Any]]) -> list[str]:
    by_name = {(entry["variant"], entry["metric"]): entry for entry in entries}
    firsts = [entry for (_, metric), entry in by_name.items() if metric == "first batch"]
    words = [
        f"first batch, {entry['variant']}: {entry['conditions']['longest_s']:.2f} s at worst, not below {MOST_S} s"
        for entry in firsts
        if entry["conditions"]["longest_s"] >= MOST_S
    ]
    usual, change = by_name["usual batch", "wait"], by_name["change of windows", "wait"]
    longest, most = change["conditions"]["longest_ms"], 2 * usual["p50"] + MOST_STALL_MS
    if longest >= most:
        words.append(f"change of windows: a wait of {longest:.1f} ms, not below {most:.1f} ms")
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--child", choices=("first", "waits"), help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(first_batch(chosen.store, chosen.began) if chosen.child == "first" else waits(chosen.store)))
        return 0

    from _rows import record, show
    from recperf.data.yambda.synthesize import write_store
    from recperf.data.yambda.synthesize.config import of_size

    with tempfile.TemporaryDirectory() as temporary:
        folder = write_store(of_size(chosen.events), chosen.store or Path(temporary) / "store")
        entries = measured(folder)
    for entry in entries:
        print(show(entry))
    if chosen.events == EVENTS:
        print(f"rows appended to {record(entries).name}")
    words = missed(entries)
    for line in words:
        print(line)
    return 5 if words else 0


if __name__ == "__main__":
    sys.exit(main())
