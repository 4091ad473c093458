"""Raw Yambda to something trainable: ours against an imitation of the reference's way, each in processes of its own.

Made-up raw files of 12 and 60 million events are prepared. The two ways do not write the same: ours writes an event
store, which is all that training needs here; the reference's way writes sessions and, from them, flat arrays, which its
training needs. The imitation, in `_yambda_prepare.py`, runs at the smaller size only: it holds everything in memory.
Files are in the page cache for all. The peak is that of the whole process, from the kernel after the work. 5b figures
are straight lines through both sizes; there the raw file will not be in the page cache, and a disk slower than the pass
sets the pace.

Run as `python benchmarks/yambda_prepare.py [--events N]`: N and 5 N events instead, and no rows are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from _rows import record, row, show
from recperf.data.events.store import EVENT_BYTES, open_store
from recperf.data.known.yambda.yambda_like import of_size

EVENTS, TIMES = 12_000_000, 5
REFERENCE_RATE = 12_000_000 / 15.2
"""What the reference was measured at, with 2 cores."""
MOST_PEAK = 1.5 * (1 << 30)
ROUNDS = {"small": 3, "large": 2}
FULL = {"events": 4_790_000_000, "kept": 4_763_272_693, "users": 1_000_000, "items": 9_390_624}
"""Yambda 5b: raw events, those that train, users, items of the catalogue."""


def in_child(*words: object) -> dict[str, Any]:
    script = Path(__file__).with_name("_yambda_prepare.py")
    done = subprocess.run(
        [sys.executable, str(script), *map(str, words)], stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout))


WRITES = {
    "small": "an event store",
    "large": "an event store",
    "peer": "sessions, test events, index, popularity, flat arrays; no anchors",
}
"""What each way leaves on the disk."""


def agree(folder: Path, peer: Path) -> None:
    """All kept the same events; within a tick the imitation's sort may order them differently."""
    store, kinds = open_store(folder), open_store(folder).kinds(slice(None))
    flat = {name: np.load(peer / f"flat_{name}.npy") for name in ("item_ids", "timestamps", "is_listen_plus")}
    assert np.array_equal(store.times_E, flat["timestamps"])
    assert int(store.items_E[:].sum(dtype=np.int64)) == int(flat["item_ids"].sum())
    assert int((kinds & 1).sum()) == int(flat["is_listen_plus"].sum())


def measure(place: Path, events: int) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Runs of all at the smaller size, in turn, and of ours at the larger; and how the raw files are packed."""
    found: dict[str, list[dict[str, Any]]] = {"small": [], "large": [], "peer": []}
    packed = {}
    for size, count in (("small", events), ("large", TIMES * events)):
        raw = place / size
        made = in_child("make", raw, count)
        packed[size] = {key: made[key] for key in ("codec", "row_group_rows", "row_groups", "bytes")}
        for number in range(ROUNDS[size]):
            store, peer = place / "store", place / "peer"
            found[size].append(in_child("ours", raw, store))
            if size == "small":
                found["peer"].append(in_child("peer", raw, peer))
                if number == 0:
                    agree(store, peer)
                shutil.rmtree(peer)
            shutil.rmtree(store)
            print(f"{size}, round {number + 1} of {ROUNDS[size]}", file=sys.stderr)
        shutil.rmtree(raw)
    return found, packed


def middle(runs: list[dict[str, Any]], key: str) -> float:
    return float(np.median([run[key] for run in runs]))


def at_5b(found: dict[str, list[dict[str, Any]]], items: dict[str, int]) -> dict[str, float]:
    """Time along the line through both sizes, disk by what an event takes, memory by what the catalogue adds."""
    small, large = found["small"], found["large"]
    slope = (middle(large, "seconds") - middle(small, "seconds")) / (large[0]["events"] - small[0]["events"])
    peak = max(run["peak"] for run in small + large) + 2 * 8 * max(0, FULL["items"] - items["large"])
    return {
        "seconds": middle(large, "seconds") + slope * (FULL["events"] - large[0]["events"]),
        "seconds_by_rate": FULL["events"] / (large[0]["events"] / middle(large, "seconds")),
        "disk": EVENT_BYTES * FULL["kept"] + 12 * FULL["users"] + 8 * FULL["items"],
        "peak": peak,
    }


def entries_of(
    found: dict[str, list[dict[str, Any]]], packed: dict[str, Any], items: dict[str, int]
) -> list[dict[str, Any]]:
    shared = {"cores": os.cpu_count(), "page_cache": "warm", "items": items}
    names = {"small": "recperf", "large": "recperf", "peer": "reference's way"}
    parts = {"peer": ("sessions_s", "cache_s")}
    entries = []
    for key, runs in found.items():
        variant = f"{names[key]}, {runs[0]['events'] / 1e6:.0f}M"
        raw = packed["large" if key == "large" else "small"]
        conditions = shared | {"events": runs[0]["events"], "writes": WRITES[key], "raw": raw}
        conditions |= {part: [run[part] for run in runs] for part in parts.get(key, ())}
        rates = [run["events"] / run["seconds"] for run in runs]
        peaks, disks = [run["peak"] / (1 << 20) for run in runs], [run["bytes"] / run["events"] for run in runs]
        entries += [
            row("yambda_prepare", variant, "rate", "events/s", rates, conditions),
            row("yambda_prepare", variant, "peak", "MiB", peaks, conditions),
            row("yambda_prepare", variant, "disk", "B/event", disks, conditions),
        ]
    full = at_5b(found, items)
    conditions = shared | {"extrapolated_from": [found[key][0]["events"] for key in ("small", "large")], **FULL, **full}
    variant = "recperf, 5b extrapolated"
    return [
        *entries,
        row("yambda_prepare", variant, "time", "min", [full["seconds"] / 60], conditions),
        row("yambda_prepare", variant, "peak", "MiB", [full["peak"] / (1 << 20)], conditions),
        row("yambda_prepare", variant, "disk", "GB", [full["disk"] / 1e9], conditions),
    ]


def missed(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    faults = []
    peer = found["peer"][0]["events"] / middle(found["peer"], "seconds")
    for size in ("small", "large"):
        rate, peak = found[size][0]["events"] / middle(found[size], "seconds"), max(run["peak"] for run in found[size])
        for goal, whose in ((peer, "the imitation's in this run"), (REFERENCE_RATE, "the reference's")):
            if rate < goal:
                faults.append(f"{size}: {rate:,.0f} events/s, less than {whose} {goal:,.0f}")
        if peak > MOST_PEAK:
            faults.append(f"{size}: peak {peak / (1 << 20):,.0f} MiB, more than {MOST_PEAK / (1 << 20):,.0f}")
    return faults


def main(words: list[str]) -> int:
    if find_spec("polars") is None:
        print("the imitation needs polars: pip install 'recperf[bench]'")
        return 4
    events = int(words[1]) if words[:1] == ["--events"] else EVENTS
    with tempfile.TemporaryDirectory(prefix="yambda-prepare-") as place:
        found, packed = measure(Path(place), events)
    items = {"small": of_size(events).items, "large": of_size(TIMES * events).items}
    entries = entries_of(found, packed, items)
    for entry in entries:
        print(show(entry))
    if events == EVENTS:
        print(f"rows appended to {record(entries).name}")
    else:
        print(f"not the full size ({EVENTS:,} events): no rows kept")
    faults = missed(found)
    for fault in faults:
        print(f"missed: {fault}")
    return 5 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
