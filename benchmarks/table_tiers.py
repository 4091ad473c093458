"""Training steps of dlrm-v4 with its tables on the GPU, in host memory and in files.

The published model, batch 1,024, made-up batches whose lengths and distinct items are like the benchmark's. With `--ids
even` the rows of a batch are spread evenly over the tables, without the popularity of real ids, so that the cache holds
of them only what it has by chance. With `--ids reuse` items, albums and artists are drawn from the power law that the
published data has; crosses and users stay spread evenly. The cache is full, and for each row that is read one is
written back. `fbgemm` is the same step with the tables in FBGEMM's TBE, rows in host memory and a cache of the same
size (MANAGED_CACHING). All rows of the store were written before, so none is computed instead of read. A reading is the
time between the ends of two steps by the device's events. With `--fresh` no row was written before, so that tables
larger than memory and disk can be measured; the rows of `--earlier` batches go through the cache first. With `--drop`
the pages of table files are written to the disk and dropped four times a second, so that rows are read from the disk.
With `--check` only kernels whose results do not vary are used, the cache is small, and losses of all placements of one
size have to be equal to the bit.

Run as `python benchmarks/table_tiers.py --sizes 37 93 --placements device host file`; `--tiny` runs anywhere.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from _fbgemm_peer import CachedTables, fbgemm_problem
from _histories import MEAN, SHORTEST, made_up
from _rows import record, row, show
from dlrm_v4_step import RATE, ROOM, Trainer, parts_that_fit
from recperf.data.batch import HistoryBatch
from recperf.data.streaming.features import CONTEXT, HISTORY
from recperf.machine import available_bytes
from recperf.models.dlrm_v4.config import DLRMv4Config, gpu, laptop
from recperf.models.dlrm_v4.inputs import Inputs, prepare_parts
from recperf.models.dlrm_v4.tables import TieredDLRMv4Tables
from recperf.models.tiers.cache import TieredRows
from recperf.models.tiers.config import TablesConfig, Tiers
from recperf.models.tiers.opening import open_tiers
from recperf.models.tiers.slots import Placed, Traffic
from recperf.train.feeds import prefetched
from recperf.workloads.dlrm_v4.plan import EXPONENT

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


Made = Callable[[int], HistoryBatch]
"""Makes the batch with a number."""


def moved(ids: torch.Tensor, number: int) -> torch.Tensor:
    """Other ids: each is multiplied by an odd number of its own for each batch."""
    return ids * (2 * (STRIDES[0] * number % 1_000_003) + 1) + STRIDES[1] * number


def spread_evenly(bases: list[HistoryBatch]) -> Made:
    def made(number: int) -> HistoryBatch:
        base = bases[number % len(bases)]
        return replace(base, features=replace(base.features, values_V=moved(base.features.values_V, number)))

    return made


def reused(bases: list[HistoryBatch], rows: dict[str, int]) -> Made:
    """Batches whose different items, albums and artists are drawn from the power law of the published data."""
    places = []
    for base in bases:
        batch, values_V = len(base), base.features.values_V
        events = int(base.history_offsets_B1[-1])
        sizes = [len(CONTEXT) * batch, len(HISTORY) * events, len(HISTORY) * batch]
        context, history, candidates = torch.split(values_V, sizes)
        parts = zip(torch.split(history, events), torch.split(candidates, batch))
        places.append((context, [torch.unique(torch.cat(part), return_inverse=True)[1] for part in parts], events))

    def made(number: int) -> HistoryBatch:
        base = bases[number % len(bases)]
        context, inverses, events = places[number % len(bases)]
        draw = np.random.default_rng(number)
        ids = [drawn(rows[name], int(one.max()) + 1, draw)[one] for name, one in zip(HISTORY, inverses)]
        values = [moved(context, number), *(one[:events] for one in ids), *(one[events:] for one in ids)]
        return replace(base, features=replace(base.features, values_V=torch.cat(values)))

    return made


def drawn(rows: int, count: int, draw: np.random.Generator) -> torch.Tensor:
    """So many rows of a table, different ones as far as it has them; row k is as likely as k ** -EXPONENT."""
    different = np.empty(0, np.int64)
    while len(different) < min(count, rows // 2):
        more = (rows * draw.random(2 * count) ** (1 / (1 - EXPONENT))).astype(np.int64)
        different = np.unique(np.concatenate([different, more]))
    return torch.from_numpy(np.resize(draw.permutation(different), count))


def made_ahead(made: Made, numbers: range) -> Iterator[HistoryBatch]:
    """The batches with these numbers, made by threads some batches ahead, so that no step waits for one."""
    with ThreadPoolExecutor(BASES) as pool:
        coming = deque(pool.submit(made, number) for number in numbers[:BASES])
        for number in range(numbers.start + BASES, numbers.stop + BASES):
            batch = coming.popleft().result()
            if number < numbers.stop:
                coming.append(pool.submit(made, number))
            yield batch


@contextmanager
def dropped_pages(folder: Path) -> Iterator[None]:
    """Meanwhile the pages of files in the folder are written to the disk and dropped, again and again."""
    ended = threading.Event()

    def drop() -> None:
        while not ended.wait(0.25):
            for path in [path for path in folder.rglob("*") if path.is_file()]:
                handle = os.open(path, os.O_RDONLY)
                os.fdatasync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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
    made: Made,
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
        depth = options.depth if tiers is not None else 1

        def prepared(batch: HistoryBatch) -> Ready:
            inputs = prepare_parts(batch.to(device, non_blocking=True), config, parts)
            if tiers is None:
                return Ready(inputs, None)
            placed = tiers.place(inputs[0].rows, owner)
            return Ready([replace(part, slots=placed.slots, placed=placed) for part in inputs], placed)

        def finished(ready: Ready) -> None:
            if tiers is not None and ready.placed is not None:
                tiers.finish(ready.placed)

        def batches(numbers: range) -> Iterator[Ready]:
            return prefetched(made_ahead(made, numbers), prepared, device, depth=depth, finished=finished)

        steps = options.warm_up + options.steps + 1
        if tiers is not None:
            for _ in batches(range(steps, steps + options.earlier)):
                pass
        losses, rows, clock, before = [], [], Clock(device), Traffic()
        dropping = options.drop and placement == "file"
        with dropped_pages(Path(folder)) if dropping else nullcontext():
            for number, ready in enumerate(batches(range(steps))):
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
        facts |= {"earlier": options.earlier, "pages_dropped": dropping}
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
    parser.add_argument("--ids", nargs="+", default=["even"], choices=["even", "reuse"])
    parser.add_argument("--cache", type=float, default=40.0, help="GiB for rows in use, at most a third of all")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--fresh", action="store_true", help="rows that were never written: they get initial values")
    parser.add_argument("--earlier", type=int, default=0, help="batches whose rows go through the cache first")
    parser.add_argument("--drop", action="store_true", help="drop the pages of table files")
    parser.add_argument("--check", action="store_true", help="compare the losses of fresh tables; no rows")
    parser.add_argument("--folder", type=Path, help="parent of the table files")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-record", action="store_true")
    return parser.parse_args(arguments)


def has_room(placement: str, gib: float, options: argparse.Namespace) -> bool:
    """Whether tables of this size fit where they are placed."""
    if placement == "device":
        return bool(options.tiny or gib <= options.cache)
    if placement == "fbgemm":
        lack = "" if options.device == "cuda" else "it needs a GPU"
        lack = lack or fbgemm_problem() or ("" if gib * GIB < 0.8 * available_bytes() else "host memory has no room")
        if lack:
            print(f"{gib:.0f} GiB, fbgemm: {lack}")
        return not lack
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
    reference = None
    for gib in sizes:
        sized = scaled(config, gib)
        ways: dict[str, Callable[[list[HistoryBatch]], Made]] = {
            "even": spread_evenly,
            "reuse": partial(reused, rows=sized.table_rows),
        }
        makes = {ids: ways[ids](bases) for ids in options.ids}
        losses_by: dict[str, list[list[float]]] = {}
        for ids, placement in product(options.ids, options.placements):
            if not has_room(placement, gib, options):
                continue
            cache = int(min(options.cache, gib / 3) * GIB)
            if options.check:
                cache = min(cache, GIB)  # A few batches, so that rows leave and come back.
            seconds, losses, facts = measured(sized, makes[ids], parts, options, placement, cache, device)
            losses_by.setdefault(ids, []).append(losses)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            middle = statistics.median(seconds)
            reference = reference or (middle if placement == "device" else None)
            facts["of_all_on_the_gpu"] = middle / reference if reference else None
            facts |= {"losses": losses, "ids": ids}
            variant = f"{gib:.0f} GiB, {placement}{', reuse' * (ids == 'reuse')}"
            entry = row(NAME, variant, "step", "ms", [1e3 * one for one in seconds], facts)
            print(show(entry), facts, flush=True)
            # At once, so that a time limit loses no row.
            if not (options.tiny or options.check or options.no_record):
                record([entry])
        if options.check and any(one != of_ids[0] for of_ids in losses_by.values() for one in of_ids):
            print(f"losses differ: {losses_by}")
            return 5
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
