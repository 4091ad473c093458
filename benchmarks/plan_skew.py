"""How unevenly ids of real batches fall on ranks, and how long it takes to know.

An embedded dataset of some million made-up events, global batches of 32,768 on 32 ranks, tables as tall as its
catalogue; and the published tables with a power law, its exponent such that the hottest rank's rows fill the published
81.5 GiB. Ratios are the worst rank's bytes over the mean of its batch.

Run as `python benchmarks/plan_skew.py`; `--tiny` runs anywhere in seconds and records nothing. Exits with 5 where
counting takes longer than GOAL_S.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from _rows import record, row, show
from recperf.data.yambda import catalogue
from recperf.data.yambda.synthesize.config import of_size
from recperf.models.dlrm_v4.config import PUBLISHED_ROWS
from recperf.plan import skew
from recperf.workloads.dlrm_v4.config import mlperf
from recperf.workloads.dlrm_v4.plan import planned

NAME = "plan_skew"
RANKS, BATCH, BATCHES = 32, 1024, 4
GOAL_S = 30.0
"""For any one skew: seconds, not minutes."""
HISTORY = ("item_id", "artist_id", "album_id")


def of_data(events: int, batch: int, hashed: bool) -> tuple[float, skew.Skew]:
    store = catalogue.embedded(say=lambda _: None, config=of_size(events))
    artists, albums = (int(store.catalogue_I2[:, column].max()) + 1 for column in (0, 1))
    rows = PUBLISHED_ROWS | {"item_id": store.items, "artist_id": artists, "album_id": albums}
    made = mlperf()
    data = replace(made.data, windows=replace(made.data.windows, min_history=200))
    config = replace(made, data=data, model=replace(made.model, rows=tuple(rows.values())))
    began = perf_counter()
    workload = planned(config)
    ids = workload.ids(Path(store.folder), batch, RANKS, BATCHES)
    counted = skew.counted(ids, workload.work(), batch, RANKS, hashed=hashed)
    return perf_counter() - began, counted


def of_law(batch: int, hashed: bool) -> tuple[float, skew.Skew]:
    work = planned(mlperf()).work()
    began = perf_counter()
    found = skew.zipf(work, batch, RANKS, 0.478, hashed=hashed)
    return perf_counter() - began, found


def entries_of(name: str, seconds: float, found: skew.Skew, told: dict[str, Any]) -> list[dict[str, Any]]:
    entries = [row(NAME, name, "counting", "s", [seconds], told)]
    for table in HISTORY:
        one = found.traffic[table]
        ratios = (one.raw_NR.max(1) / one.raw_NR.mean(1)).tolist()
        entries.append(row(NAME, f"{name}, {table}", "worst / mean", "x", ratios, told))
        kept = (one.unique_NR.sum(1) / one.raw_NR.sum(1)).tolist()
        entries.append(row(NAME, f"{name}, {table}", "left by dedup", "share", kept, told))
    return entries


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="skew of ids over ranks, and the time to count it")
    parser.add_argument("--tiny", action="store_true", help="a small dataset; no rows")
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    chosen = parser.parse_args(words)
    events, batch = (60_000, 8) if chosen.tiny else (3_000_000, BATCH)
    entries = []
    for hashed in (False, True):
        for name, (seconds, found) in {
            "yambda-like": of_data(events, batch, hashed),
            "zipf 0.478": of_law(batch, hashed),
        }.items():
            told = {"ranks": RANKS, "rank_batch": batch, "hashed": hashed, "origin": found.origin, "events": events}
            entries += entries_of(f"{name}, {'hashed' if hashed else 'blocks of rows'}", seconds, found, told)
    for entry in entries:
        print(show(entry))
    if not (chosen.tiny or chosen.no_record):
        print(f"rows appended to {record(entries).name}")
    slow = [entry["variant"] for entry in entries if entry["metric"] == "counting" and entry["p50"] > GOAL_S]
    for name in slow:
        print(f"goal missed: {name} takes more than {GOAL_S:g} s")
    return 5 if slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
