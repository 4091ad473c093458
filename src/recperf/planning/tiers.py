"""Seconds of a step whose tables lie in host memory or in files, behind a cache on the device, on one rank or several.

Rows are fetched while earlier steps compute, so a step takes as long as the slower of both. How many rows a step
fetches follows from a stated share that the cache serves, or from the popularity of rows by Che's approximation: in a
cache that drops the least recently used rows, a row that is not used again stays for the same number of steps whatever
its popularity.

Shapes: K kinds of equally popular rows.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..measure.cost import FLOAT
from .devices import STORES, Device, Store
from .predict import Band, Prediction
from .sharding import PlacedTable
from .skew import kinds, never
from .target import PlannedTraining

ERROR = 0.01
"""By how much the estimated share of rows that a cache serves differs from a counted one at most, in our tests."""

Floats = NDArray[np.float64]


class StoredTables(Struct):
    """A step whose tables lie in one of the stores."""

    rows: float
    """Rows that a step fetches."""
    bytes_each_way: float
    parts: dict[str, float]
    """Seconds that the device, the link and the store are busy."""
    step: Band
    samples_per_s: float
    limit: str
    """The one of these that takes longest."""
    target: PlannedTraining | None = None


class PlannedTiers(Struct):
    """Devices with their tables in host memory or in files; the figures are those of the rank with most rows."""

    ranks: int
    rank_batch: int
    table_bytes: float
    cache_bytes: float
    rows_per_step: float
    served: float
    """Share of these that the cache holds already."""
    origin: str
    stores: dict[str, StoredTables]


def price(
    plan: Prediction,
    device: Device,
    *,
    cache_bytes: int | None = None,
    served: float | None = None,
    node_ranks: int = 1,
) -> PlannedTiers:
    """Both tiers for a step; `cache_bytes` is by default what tables leave free when they are away. The host memory and
    the disk of a node serve all of its `node_ranks`."""
    held_R = np.sum([one.weight_R + one.state_R() for one in plan.placed], axis=0)
    rank = int(held_R.argmax())
    whole = float(held_R[rank])
    free = plan.memory.limit_bytes - (plan.memory.without_reuse_bytes - whole)
    cache = min(whole, free if cache_bytes is None else cache_bytes)
    by_table = [_kinds(one, plan, rank) for one in plan.placed]
    used_T = np.array([float(count_K @ use_K) for count_K, use_K in by_table])
    used = float(used_T.sum())
    moved = float(used_T @ [FLOAT * (one.width_R[rank] + one.state_width_R[rank]) for one in plan.placed])
    record = moved / used
    if cache < moved:
        share, error, origin = 0.0, 0.0, "the cache is smaller than the rows of a batch"
    elif served is not None:
        share, error, origin = served, 0.0, "stated (--served)"
    else:
        count_K, use_K = map(np.concatenate, zip(*by_table))
        share, error = served_by(count_K, use_K, cache / record), ERROR
        popular = "spread evenly" if plan.skew.exponent is None else f"Zipf with exponent {plan.skew.exponent:g}"
        origin = f"estimated for ids {popular}"
    fetched = Band(*(used * min(1.0, max(0.0, 1 - share + change)) for change in (0.0, -error, error)))
    return PlannedTiers(
        ranks=plan.ranks,
        rank_batch=plan.rank_batch,
        table_bytes=whole,
        cache_bytes=max(0.0, cache),
        rows_per_step=used,
        served=share,
        origin=origin,
        stores={
            name: _stored(plan.global_batch, device, store, plan.step, fetched, record, node_ranks)
            for name, store in STORES.items()
            if cache >= moved
        },
    )


def served_by(count_K: Floats, use_K: Floats, slots: float) -> float:
    """The share of the rows of a step that a cache of `slots` rows holds already, once it is full: of `count_K` rows of
    each kind a step uses one with the probability `use_K`."""
    if slots >= count_K.sum():
        return 1.0
    never_K = never(use_K)

    def held(steps: float) -> float:
        """Distinct rows of `steps` steps."""
        return float(count_K @ -np.expm1(steps * never_K))

    def served(steps: float) -> float:
        """The share of the rows of a step that one of the `steps` steps before it used."""
        return 1.0 - float((count_K * use_K) @ np.exp(steps * never_K) / (count_K @ use_K))

    low, high = 0, 1 << 50
    while high - low > 1:
        steps = (low + high) // 2
        low, high = (steps, high) if held(steps) <= slots else (low, steps)
    # Of the oldest of these steps the cache holds some rows.
    part = min(1.0, (slots - held(low)) / max(1e-9, held(high) - held(low)))
    return (1 - part) * served(low) + part * served(high)


def _kinds(one: PlacedTable, plan: Prediction, rank: int) -> tuple[Floats, Floats]:
    """How many rows of each kind a rank has, and the probability that a step uses one of them, on whichever rank."""
    table, exponent, own = one.table, plan.skew.exponent, float(one.rows_R[rank] / one.table.rows)
    if exponent is None or not table.skewed:
        used = min(float(table.rows), table.distinct(plan.global_batch))
        return np.array([own * table.rows]), np.array([used / table.rows])
    count_K, share_K, _ = kinds(table.rows, exponent)
    return own * count_K, -np.expm1(plan.ranks * plan.skew.draws[table.name] * never(share_K))


def _stored(
    samples: int, device: Device, store: Store, step: Band, rows: Band, record: float, node_ranks: int
) -> StoredTables:
    """Rows come and as many go: over the link both ways at once, in the store one after the other."""

    def parts(on_device: float, fetched: float) -> dict[str, float]:
        bytes_ = fetched * record
        moving = bytes_ / store.read_bytes_per_s + bytes_ / store.write_bytes_per_s
        return {
            "the device": on_device,
            "the link": bytes_ / device.host_bytes_per_s,
            store.limit: node_ranks * (fetched / store.reads_per_s + moving),
        }

    seconds = [parts(*pair) for pair in ((step.value, rows.value), (step.low, rows.low), (step.high, rows.high))]
    slowest = Band(*(max(one.values()) for one in seconds))
    return StoredTables(
        rows=rows.value,
        bytes_each_way=rows.value * record,
        parts=seconds[0],
        step=slowest,
        samples_per_s=samples / slowest.value,
        limit=max(seconds[0], key=lambda name: seconds[0][name]),
    )
