"""Making listening events up: events a second into a store, and into raw parquet files, and the memory it takes.

Each round is a process of its own that writes everything to disk, syncs and digests it, as `recperf data make
yambda-like` does. Wall time is the claim; CPU time is told beside it, for machines that do other things too. Memory is
the peak of the process, at two sizes: it must not grow with the events, only with the catalogue.

Run as `python benchmarks/yambda_like.py [--folder FOLDER]`; it needs 1 GB of disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _rows import record, row, show

SIZES = {5_000_000: 5, 40_000_000: 1}
"""Events, and how often each size is made."""
LEAST_PER_S = 1e6

CHILD = """
import json, re, sys, time
from pathlib import Path
from recperf.data.yambda import synthesize
config, folder = synthesize.of_size(int(sys.argv[1])), Path(sys.argv[2])
began, cpu = time.perf_counter(), time.process_time()
if sys.argv[3] == "store":
    from recperf.data.yambda.store import open_store
    events = open_store(synthesize.write_store(config, folder)).events
else:
    events = synthesize.write_raw(config, folder)["events"]
print(json.dumps({
    "events": events,
    "wall": events / (time.perf_counter() - began),
    "cpu": events / (time.process_time() - cpu),
    # Not getrusage: its peak is handed down from the parent, which holds torch.
    "peak": int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024,
}))
"""


def made(events: int, form: str, place: Path | None) -> dict[str, float]:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(dir=place) as folder:
        words = [sys.executable, "-c", CHILD, str(events), f"{folder}/made", form]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, **threads})
    return dict(json.loads(done.stdout))


def measured(form: str, place: Path | None) -> list[dict[str, Any]]:
    entries = []
    for events, rounds in SIZES.items():
        if form == "raw" and rounds == 1:
            continue
        busy = os.getloadavg()[0]
        runs = [made(events, form, place) for _ in range(rounds)]
        conditions = {"form": form, "events": int(runs[0]["events"]), "load_before": round(busy, 2), "threads": 1}
        label = f"{form}, {events / 1e6:.0f}M events"
        for metric, unit in (("wall", "events/s"), ("cpu", "events/s"), ("peak", "MiB")):
            name = "memory" if metric == "peak" else f"rate by {metric}"
            entries.append(row("yambda_like", label, name, unit, [one[metric] for one in runs], conditions))
    return entries


def main(words: list[str]) -> int:
    place = Path(words[words.index("--folder") + 1]) if "--folder" in words else None
    entries = [entry for form in ("store", "raw") for entry in measured(form, place)]
    for entry in entries:
        print(show(entry))
    print(f"rows appended to {record(entries).name}")
    rates = [entry["p50"] for entry in entries if entry["metric"] == "rate by wall" and "store" in entry["variant"]]
    return 0 if min(rates) >= LEAST_PER_S else 5


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
