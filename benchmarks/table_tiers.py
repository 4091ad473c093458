"""Training steps of dlrm-v4 with its tables on the GPU, in host memory and in files.

The published model, batch 1,024, made-up batches whose lengths and distinct items are like the benchmark's. The rows of
a batch are spread evenly over the tables, without the popularity of real ids, so that the cache holds of them only what
it has by chance; the cache is full, and for each row that is read one is written back. `fbgemm` is the same step with
the tables in FBGEMM's TBE, rows in host memory and a cache of the same size (MANAGED_CACHING). All rows of the store
were written before, so none is computed instead of read. A reading is the time between the ends of two steps by the
device's events. With `--fresh` no row was written before: tables larger than memory and disk can be measured. With
`--check` only kernels whose results do not vary are used, the cache is small, and losses of all placements of one size
have to be equal to the bit.

Run as `python benchmarks/table_tiers.py --sizes 37 93 --placements device host file`; `--tiny` runs anywhere.
"""

from __future__ import annotations

import argparse
import gc
import resource
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from _fbgemm_peer import CachedTables
from _histories import MEAN, SHORTEST, made_up
from _rows import record, row, show
from dlrm_v4_step import RATE, ROOM, Trainer, parts_that_fit
from recperf.data.batch import HistoryBatch
from recperf.models.dlrm_v4.config import DLRMv4Config, gpu, laptop
from recperf.models.dlrm_v4.inputs import Inputs, prepare_parts
from recperf.models.dlrm_v4.tables import TieredDLRMv4Tables
from recperf.models.tiers.cache import TieredRows
from recperf.models.tiers.config import TablesConfig, Tiers
from recperf.models.tiers.opening import open_tiers
from recperf.models.tiers.slots import Placed, Traffic
from recperf.train.feeds import prefetched

NAME, SEED, GIB = "table_tiers", 3, 1 << 30
STRIDES = 0x9E3779B1, 0x85EBCA77
"""Odd numbers that spread the rows of one batch and the next."""
PLACEMENTS = ("device", "host", "file", "fbgemm")
BASES = 4
"""Batches that are made up; others are these with other rows."""


@dataclass(frozen=True, eq=False)
class Ready:
    """The micro-batches of a step, on the device."""

    parts: list[Inputs]
    placed: Placed | None

    def record_stream(self, stream: Any) -> None:
        for part in self.parts:
            part.record_stream(stream)


def moved(batch: HistoryBatch, number: int) -> HistoryBatch:
    """The same batch with other rows: an id is multiplied by an odd number of its own for each batch."""
    ids = batch.features.values_V * (2 * (STRIDES[0] * number % 1_000_003) + 1) + STRIDES[1] * number
    features = replace(batch.features, values_V=ids)
    return replace(batch, features=features)


def write_all(tiers: TieredRows) -> float:
    """Write every row of the store; returns the seconds."""
    began, rows, step = perf_counter(), tiers.store.rows, 1 << 18
    values = np.random.default_rng(1).uniform(-1e-3, 1e-3, (step, tiers.store.width)).astype(np.float32)
    values[:, tiers.dim :] = 0
    for first in range(0, rows, step):
        here = np.arange(first, min(first + step, rows))
        tiers.store.write(here, values[: len(here)])
    return perf_counter() - began


def fill(tiers: TieredRows) -> None:
    """Fill the cache, so that each further row replaces one."""
    owner, (name, rows) = object(), max(tiers.tables.items(), key=lambda table: table[1])
    step = 1 << 18
    for first in range(0, min(rows, len(tiers.slots)), step):
        here = torch.arange(first, min(first + step, rows, len(tiers.slots)), device=tiers.device)
        tiers.finish(tiers.place({name: here}, owner))


def trainer_of(
    config: DLRMv4Config, placement: Any, cache: int, depth: int, folder: Path, device: torch.device
) -> tuple[Trainer, TieredRows | None]:
    if placement == "device":
        return Trainer(config, device), None
    if placement == "fbgemm":
        peer: Any = CachedTables(config.table_rows, config.table_dim, cache, device, RATE)
        return Trainer(config, device, tables=peer), None
    tables = TablesConfig(placement=placement, depth=depth, folder=folder)
    tiers = open_tiers(
        config.table_rows, Tiers(placement, cache, "", options=tables), dim=config.table_dim, state=1, device=device
    )
    return Trainer(config, device, tables=TieredDLRMv4Tables(config, tiers, seed=SEED)), tiers


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Clock:
    """The times between the ends of steps: by the device's events, on a CPU by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ends: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            self.ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self.ends[-1].record()
        else:
            self.ends.append(perf_counter())

    def seconds(self) -> list[float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [begin.elapsed_time(end) * 1e-3 for begin, end in zip(self.ends, self.ends[1:])]
        return [end - begin for begin, end in zip(self.ends, self.ends[1:])]


def measured(
    config: DLRMv4Config,
    bases: list[HistoryBatch],
    parts: int,
    options: argparse.Namespace,
    placement: str,
    cache: int,
    device: torch.device,
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Seconds of steps, the losses of the first ones, and facts."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trainer, tiers = trainer_of(config, placement, cache, options.depth, Path(folder), device)
        facts: dict[str, Any] = {"placement": placement, "depth": options.depth, "micro_batches": parts}
        if tiers is not None and not (options.fresh or options.check):
            facts["store_written_s"] = write_all(tiers)
            fill(tiers)
        owner = object()

        def source() -> Iterator[HistoryBatch]:
            for number in range(options.warm_up + options.steps + 1):
                yield moved(bases[number % len(bases)], number)

        def prepared(batch: HistoryBatch) -> Ready:
            inputs = prepare_parts(batch.to(device, non_blocking=True), config, parts)
            if tiers is None:
                return Ready(inputs, None)
            placed = tiers.place(inputs[0].rows, owner)
            return Ready([replace(part, slots=placed.slots, placed=placed) for part in inputs], placed)

        def finished(ready: Ready) -> None:
            if tiers is not None and ready.placed is not None:
                tiers.finish(ready.placed)

        losses, rows, clock = [], [], Clock(device)
        before = Traffic()
        depth = options.depth if tiers is not None else 1
        for number, ready in enumerate(prefetched(source(), prepared, device, depth=depth, finished=finished)):
            if tiers is not None and number == options.warm_up:
                before = replace(tiers.traffic)
            trainer.step(ready.parts)
            losses.append(trainer.last)
            rows.append(sum(rows_U.numel() for rows_U in ready.parts[0].rows.values()))
            clock.mark()
        seconds = clock.seconds()[options.warm_up :]
        if device.type == "cuda":
            facts["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        facts |= {"distinct_rows": statistics.fmean(rows), "table_gib": 4 * config.table_parameters / GIB}
        facts |= {"table_parameters": config.table_parameters, "host_gib": resident_bytes() / GIB}
        facts["disk_gib"] = sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*") if file.is_file()) / GIB
        if tiers is not None:
            facts |= tiers.facts(tiers.traffic.since(before))
            tiers.close()
        return seconds, [float(loss) for loss in losses[:8]], facts


def scaled(config: DLRMv4Config, gib: float) -> DLRMv4Config:
    """With tables of this size; the published ones take 559 GiB."""
    scale = config.row_scale * gib * GIB / (4 * config.table_parameters)
    return replace(config, row_scale=round(scale) if abs(scale - round(scale)) < 0.01 * scale else scale)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model on any device; no rows")
    parser.add_argument("--sizes", type=float, nargs="+", default=[37.0, 93.0], help="GiB of tables")
    parser.add_argument("--placements", nargs="+", default=["device", "host"], choices=PLACEMENTS)
    parser.add_argument("--cache", type=float, default=40.0, help="GiB for rows in use, at most a third of all")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--fresh", action="store_true", help="rows that were never written: they get initial values")
    parser.add_argument("--check", action="store_true", help="compare the losses of fresh tables; no rows")
    parser.add_argument("--folder", type=Path, help="parent of the table files")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-record", action="store_true")
    return parser.parse_args(arguments)


def has_room(placement: str, gib: float, options: argparse.Namespace) -> bool:
    """Whether tables of this size fit where they are placed."""
    if placement in ("device", "fbgemm"):
        return bool(options.tiny or gib <= options.cache)
    if placement == "host" or options.fresh:
        return True
    if shutil.disk_usage(options.folder or ".").free >= 1.2 * gib * GIB:
        return True
    print(f"{gib:.0f} GiB, file: the disk has no room")
    return False


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    device, config = torch.device(options.device), gpu()
    if options.tiny:
        config, options.batch, options.steps, options.warm_up = laptop(), 6, 3, 2
        bases = [made_up(config, 6, SEED + number, mean=25, shortest=10) for number in range(BASES)]
        sizes, parts = [4 * config.table_parameters / GIB], 1
    else:
        bases = [made_up(config, options.batch, SEED + number, mean=MEAN, shortest=SHORTEST) for number in range(BASES)]
        sizes = options.sizes
        limit = ROOM * torch.cuda.get_device_properties(device).total_memory - 6 * GIB
        # All steps have as many micro-batches: on the device lies at most a cache, or a table that is as small.
        held = scaled(config, min(options.cache, max(sizes)))
        parts = max(parts_that_fit(held, batch, limit) for batch in bases)
    if device.type == "cuda":
        bases = [batch.pin_memory() for batch in bases]
    torch.use_deterministic_algorithms(options.check)
    rows, reference = [], None
    for gib in sizes:
        sized = scaled(config, gib)
        losses_by: dict[str, list[float]] = {}
        for placement in options.placements:
            if not has_room(placement, gib, options):
                continue
            cache = int(min(options.cache, gib / 3) * GIB)
            if options.check:
                cache = min(cache, GIB)  # A few batches, so that rows leave and come back.
            seconds, losses, facts = measured(sized, bases, parts, options, placement, cache, device)
            losses_by[placement] = losses
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            middle = statistics.median(seconds)
            reference = reference or (middle if placement == "device" else None)
            facts["of_all_on_the_gpu"] = middle / reference if reference else None
            facts["losses"] = losses
            rows.append(row(NAME, f"{gib:.0f} GiB, {placement}", "step", "ms", [1e3 * one for one in seconds], facts))
            print(show(rows[-1]), facts, flush=True)
        if options.check and len({tuple(one) for one in losses_by.values()}) > 1:
            print(f"losses differ: {losses_by}")
            return 5
    if not (options.tiny or options.check or options.no_record):
        print(f"rows appended to {record(rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
