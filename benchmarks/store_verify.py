"""What it costs to compare every block of an event store with its digest when it is first read.

The store is synthetic, 20M events with the statistics of Yambda. Fresh Python processes open it, wait for the first
batch of 1,024 histories of up to 4,086 events, and load the next batches, in turn with verification and without. The
first batches read every block, so that the difference between the two is all that verification costs a process; the
time that its calls take, summed over threads, shows how much of the difference is noise.

The difference is compared with the time to the first batch plus an epoch of loading: the first batch without
verification, and as many batches as the epoch has at the rate of those that were loaded.

Run as `python benchmarks/store_verify.py [--events N] [--store FOLDER] [--dry]`; a store given is made there once and
kept. Rows are recorded at the full size only. The exit code is 5 if verification costs 2 % or more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np

EVENTS, BATCH, BATCHES, ROUNDS = 20_000_000, 1024, 50, 9
WORKERS, PREFETCH = 2, 4
MOST_SHARE = 0.02


def load(folder: Path, verify: bool, began: float) -> dict[str, Any]:
    """Seconds to the first batch from the start of the process, and of the batches after it."""
    from recperf.data import blocks
    from recperf.data.yambda.config import HistoryConfig, WindowConfig
    from recperf.data.yambda.history import Histories
    from recperf.data.yambda.loader import Loader
    from recperf.data.yambda.order import StreamOrder
    from recperf.data.yambda.store import open_store
    from recperf.data.yambda.windows import WindowIndex

    blocks.ENABLED, timed, require = verify, [], blocks.Blocks.require

    def timed_require(self: blocks.Blocks, first: Any, stop: Any) -> None:
        entered = perf_counter()
        require(self, first, stop)
        timed.append(perf_counter() - entered)

    blocks.Blocks.require = timed_require  # type: ignore[method-assign]
    store = open_store(folder)
    index = WindowIndex.open(store, WindowConfig())
    order = StreamOrder(index, windows=range(index.windows - 1), batch_size=BATCH)
    with Loader(order, Histories(store, HistoryConfig()), workers=WORKERS, prefetch=PREFETCH) as loader:
        stream = iter(loader)
        next(stream)
        first = monotonic() - began
        loaded = sum(1 for _, _ in zip(range(BATCHES), stream))
        rest = monotonic() - began - first
    read = sum(column.array.nbytes for column in (*store.columns, *store.tables))
    if verify and store.verified()["bytes"] != read:
        sys.exit(f"the batches read {store.verified()['bytes']:,} of {read:,} bytes: load more of them")
    return {
        "first": first,
        "rest": rest,
        "loaded": loaded,
        "epoch": len(order),
        "timed": sum(timed),
        "verified": store.verified()["bytes"],
    }


def child(folder: Path, verify: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--store", str(folder), "--child", "on" if verify else "off"]
    output = subprocess.run([*command, "--began", repr(monotonic())], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(output.stdout))


def measured(folder: Path) -> list[dict[str, Any]]:
    from _rows import row

    child(folder, True)  # Builds the index, and brings the files into memory.
    pairs = [(child(folder, True), child(folder, False)) for _ in range(ROUNDS)]
    off = pairs[0][1]
    facts = {"batch": BATCH, "loaded": off["loaded"], "epoch": off["epoch"], "verified_bytes": pairs[0][0]["verified"]}
    cost = [with_["first"] + with_["rest"] - without["first"] - without["rest"] for with_, without in pairs]
    epoch = [without["first"] + without["rest"] / without["loaded"] * without["epoch"] for _, without in pairs]
    quantities = [
        ("verification", "cost", "s", cost),
        ("verification", "in its calls", "s", [with_["timed"] for with_, _ in pairs]),
        ("verification", "share", "", [one / median(epoch) for one in cost]),
        ("verification", "first batch", "s", [with_["first"] for with_, _ in pairs]),
        ("no verification", "first batch", "s", [without["first"] for _, without in pairs]),
        ("no verification", "with an epoch", "s", epoch),
    ]
    return [row("store_verify", *quantity, facts) for quantity in quantities]


def median(values: list[float]) -> float:
    return float(np.median(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--dry", action="store_true", help="measure and print, but record nothing")
    parser.add_argument("--child", choices=("on", "off"), help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(load(chosen.store, chosen.child == "on", chosen.began)))
        return 0

    from _rows import record, show
    from recperf.data.yambda.synthesize import write_store
    from recperf.data.yambda.synthesize.config import of_size

    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.store or Path(temporary) / "store"
        entries = measured(write_store(of_size(chosen.events), folder))
    for entry in entries:
        print(show(entry))
    if chosen.events == EVENTS and not chosen.dry:
        print(f"rows appended to {record(entries).name}")
    share = next(entry["p50"] for entry in entries if entry["metric"] == "share")
    if share >= MOST_SHARE:
        print(f"verification takes {share:.1%} of the first batch and an epoch, not below {MOST_SHARE:.0%}")
        return 5
    return 0


if __name__ == "__main__":
    sys.exit(main())
