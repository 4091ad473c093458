"""What a skew costs under each kind of sharding, the largest batch that fits, and changes that make a plan fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..measure.cost import FLOAT
from .devices import Device
from .memory import HALF, Memory, largest_tables, memory_of
from .predict import Prediction
from .sharding import KINDS, Kind, KindOrAuto, Parallelism, place
from .skew import Skew
from .work import Work

REMEDIES: tuple[Kind, ...] = ("column", "row", "table")
"""In the order they are tried: columns help for any ids."""
LARGEST_BATCH = 1 << 16
"""Largest rank batch in the search for the one that fits."""


MOST_OVERRIDES = 4
"""Tables whose sharding a remedy changes at most."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Bytes of one table that each rank sends in the forward pass, and receives in the backward pass."""

    table: str
    kind: Kind
    dedup: bool
    mean: float
    """Over all batches and ranks."""
    worst: float
    """The worst rank in the worst batch."""
    batch: int
    rank: int

    @property
    def ratio(self) -> float:
        return self.worst / self.mean if self.mean else 1.0


def arrivals(work: Work, skew: Skew, batch: int, ranks: int, parallelism: Parallelism) -> list[Arrivals]:
    """For each table with skewed ids, under each kind of sharding, with and without dedup."""
    number = HALF if parallelism.wire == "fp16" else FLOAT
    rows = []
    for table in work.tables:
        if not table.skewed:
            continue
        traffic = skew.traffic[table.name]
        for kind in KINDS:
            for dedup in (False, True):
                changed = replace(parallelism, sharding=kind, overrides={}, dedup=dedup)
                (one,) = place((table,), ranks, skew, batch, changed)
                bytes_NR = np.stack(
                    [number * one.sent_R(traffic.batch(n), batch, dedup=dedup) for n in range(traffic.batches)]
                )
                at, rank = np.unravel_index(int(np.argmax(bytes_NR)), bytes_NR.shape)
                rows.append(
                    Arrivals(
                        table=table.name,
                        kind=kind,
                        dedup=dedup,
                        mean=float(bytes_NR.mean()),
                        worst=float(bytes_NR.max()),
                        batch=int(at),
                        rank=int(rank),
                    )
                )
    return rows


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The largest batch that fits in memory."""

    sharding: str
    rank_batch: int
    """Samples of a rank; 0: not even one fits."""
    table: str | None
    """The largest table on the fullest rank for the next larger batch; None: the largest batch tried still fits."""


def limit(plan: Prediction, parallelism: Parallelism, device: Device, sharding: str) -> Limit:
    """The largest batch that fits if the number of ids grows with the batch. Distinct ids grow more slowly, so with
    dedup a larger batch may fit."""

    def at(batch: int) -> Memory:
        skew = plan.skew.scaled(batch / plan.rank_batch)
        placed = place(plan.work.tables, plan.ranks, skew, batch, parallelism)
        return memory_of(plan.work, placed, skew, batch, device, parallelism)

    if at(LARGEST_BATCH).fits:
        return Limit(sharding=sharding, rank_batch=LARGEST_BATCH, table=None)
    low, high = 0, 1
    while at(high).fits:
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle).fits else (low, middle)
    return Limit(sharding=sharding, rank_batch=low, table=at(high).largest_table)


def limits(plan: Prediction, parallelism: Parallelism, device: Device) -> list[Limit]:
    """For each kind of sharding of the tables with skewed ids, with and without dedup."""
    skewed = [table.name for table in plan.work.tables if table.skewed]
    rows = []
    for dedup in (False, True):
        for kind in KINDS:
            overrides = {**parallelism.overrides, **dict.fromkeys(skewed, kind)}
            changed = replace(parallelism, overrides=overrides, dedup=dedup)
            rows.append(limit(plan, changed, device, f"{kind}-wise, {'with' if dedup else 'without'} dedup"))
    return rows


def remedies(plan: Prediction, parallelism: Parallelism, device: Device, most: int = 3) -> list[tuple[str, Memory]]:
    """Changes that make the plan fit, the smallest first: command-line options, and the memory with them."""
    fitting = []
    for options, changed in _changes(plan, parallelism):
        placed = place(plan.work.tables, plan.ranks, plan.skew, plan.rank_batch, changed)
        memory = memory_of(plan.work, placed, plan.skew, plan.rank_batch, device, changed)
        if memory.fits:
            fitting.append((options, memory))
        if len(fitting) == most:
            break
    return fitting


def _changes(plan: Prediction, parallelism: Parallelism) -> Iterator[tuple[str, Parallelism]]:
    if parallelism.codec == "clamp-copy" and parallelism.wire == "fp16":
        yield "--codec in-place", replace(parallelism, codec="in-place")
    if parallelism.wire == "fp32":
        yield "--a2a fp16", replace(parallelism, wire="fp16")
    memory = plan.memory
    tables = largest_tables(plan.placed, plan.skew, memory.batch, plan.rank_batch, parallelism.dedup, memory.fullest)[
        :MOST_OVERRIDES
    ]
    for count in range(1, len(tables) + 1):
        for kind in REMEDIES:
            overrides: dict[str, KindOrAuto] = {**parallelism.overrides, **dict.fromkeys(tables[:count], kind)}
            options = " ".join(f"--shard {name}={kind}" for name in tables[:count])
            yield options, replace(parallelism, overrides=overrides)
    if not parallelism.dedup:
        yield "--dedup on", replace(parallelism, dedup=True)
    if parallelism.sharding != "auto" or parallelism.overrides:
        yield "--sharding auto", replace(parallelism, sharding="auto", overrides={})
    if not parallelism.dedup:
        yield "--sharding auto --dedup on", replace(parallelism, sharding="auto", overrides={}, dedup=True)
