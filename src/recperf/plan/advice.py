"""What a skew does to each way of sharding, where memory ends, and which override helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..measure.cost import FLOAT
from .devices import Device
from .memory import HALF, Memory, Wire
from .predict import Choices, Prediction, memory_now, place_all
from .sharding import KINDS, Kind, Wish, place
from .skew import Skew
from .work import Work

REMEDIES: tuple[Kind, ...] = ("column", "row", "table")
"""In the order they are tried: columns help whatever the ids are."""
MOST_BATCH = 1 << 16
"""Samples of a rank up to which the end of memory is looked for."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Bytes of one table that reach each rank on the way back, which it sends on the way forward."""

    table: str
    kind: Kind
    dedup: bool
    mean: float
    """Of all batches and ranks."""
    worst: float
    """Of the worst rank in the worst batch."""
    batch: int
    rank: int

    @property
    def ratio(self) -> float:
        return self.worst / self.mean if self.mean else 1.0


def arrivals(
    work: Work, skew: Skew, batch: int, ranks: int, *, width: int, wire: Wire, only: tuple[str, ...] = ()
) -> list[Arrivals]:
    """Of each table whose ids are the data's, under each way of sharding, with and without dedup."""
    number = HALF if wire == "fp16" else FLOAT
    found = []
    for table in work.tables:
        if not table.skewed or (only and table.name not in only):
            continue
        traffic = skew.traffic[table.name]
        for kind in KINDS:
            for dedup in (False, True):
                (one,) = place((table,), ranks, skew, batch, wish=kind, width=width, dedup=dedup)
                bytes_NR = np.stack(
                    [number * one.sent_R(traffic.batch(n), batch, dedup=dedup) for n in range(traffic.batches)]
                )
                at, rank = np.unravel_index(int(np.argmax(bytes_NR)), bytes_NR.shape)
                found.append(
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
    return found


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Where memory ends."""

    words: str
    rank_batch: int
    """The most samples of a rank that fit; 0: not even one."""
    table: str | None
    """The largest table of the fullest rank just beyond; none: memory did not end where it was looked for."""


def limit(found: Prediction, choices: Choices, device: Device, words: str) -> Limit:
    """The largest batch that fits, ids growing with it. Distinct ids grow more slowly, so that with dedup there may be
    more room than is told."""

    def at(batch: int) -> Memory:
        skew = found.skew.scaled(batch / found.rank_batch)
        placed = place_all(found.work, found.ranks, skew, batch, choices)
        return memory_now(found.work, placed, skew, batch, device, choices)

    if at(MOST_BATCH).fits:
        return Limit(words=words, rank_batch=MOST_BATCH, table=None)
    low, high = 0, 1
    while at(high).fits:
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle).fits else (low, middle)
    return Limit(words=words, rank_batch=low, table=at(high).blamed)


def limits(found: Prediction, choices: Choices, device: Device) -> list[Limit]:
    """Under each way of sharding the tables with the data's ids, with and without dedup."""
    skewed = [table.name for table in found.work.tables if table.skewed]
    rows = []
    for dedup in (False, True):
        for kind in KINDS:
            overrides = {**choices.overrides, **dict.fromkeys(skewed, kind)}
            words = f"{kind}-wise, {'with' if dedup else 'without'} dedup"
            rows.append(limit(found, replace(choices, overrides=overrides, dedup=dedup), device, words))
    return rows


def remedies(found: Prediction, choices: Choices, device: Device, most: int = 3) -> list[tuple[str, Memory]]:
    """Changes that make it fit, the smallest first: words for the command line, and the memory then."""
    fitting = []
    for words, changed in _changes(found, choices):
        placed = place_all(found.work, found.ranks, found.skew, found.rank_batch, changed)
        memory = memory_now(found.work, placed, found.skew, found.rank_batch, device, changed)
        if memory.fits:
            fitting.append((words, memory))
        if len(fitting) == most:
            break
    return fitting


def _changes(found: Prediction, choices: Choices) -> Iterator[tuple[str, Choices]]:
    if choices.codec == "clamp-copy" and choices.wire == "fp16":
        yield "--codec in-place", replace(choices, codec="in-place")
    if choices.wire == "fp32":
        yield "--a2a fp16", replace(choices, wire="fp16")
    tables = _largest(found, choices)
    for count in range(1, len(tables) + 1):
        for kind in REMEDIES:
            overrides: dict[str, Wish] = {**choices.overrides, **dict.fromkeys(tables[:count], kind)}
            words = " ".join(f"--shard {name}={kind}" for name in tables[:count])
            yield words, replace(choices, overrides=overrides)
    if not choices.dedup:
        yield "--dedup on", replace(choices, dedup=True)
    if choices.sharding != "auto" or choices.overrides:
        yield "--sharding auto", replace(choices, sharding="auto", overrides={})
    if not choices.dedup:
        yield "--sharding auto --dedup on", replace(choices, sharding="auto", overrides={}, dedup=True)


def _largest(found: Prediction, choices: Choices, most: int = 4) -> list[str]:
    """Tables with most on the fullest rank, vectors on their way included."""
    rank, number = found.memory.fullest, found.memory.batch

    def held(name: str) -> float:
        one = next(one for one in found.placed if one.table.name == name)
        traffic = found.skew.traffic[name]
        traffic = traffic.batch(min(number, traffic.batches - 1))
        sent_R = one.sent_R(traffic, found.rank_batch, dedup=choices.dedup)
        return float(one.weight_R[rank] + FLOAT * sent_R[rank])

    return sorted((one.table.name for one in found.placed), key=held, reverse=True)[:most]
