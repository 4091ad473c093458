"""Seconds of a step whose tables lie in host memory or in files, behind a cache on the device.

Rows are fetched while earlier steps compute, so a step takes as long as the slower of both. How many rows a step
fetches follows from a stated share that the cache serves, or from the popularity of rows by Che's approximation: in a
cache that drops the least recently used rows, a row that is not used again stays for the same number of steps whatever
its popularity.

Shapes: K kinds of equally popular rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..measure.cost import FLOAT
from .devices import STORES, Device, Store
from .predict import Prediction
from .skew import popularity
from .work import Table

KINDS = 512
"""Kinds of rows that a table with skewed ids is divided into, by popularity."""

Floats = NDArray[np.float64]


def price(
    plan: Prediction, device: Device, *, cache_bytes: int | None = None, served: float | None = None
) -> dict[str, Any]:
    """Both tiers for the step of one rank; `cache_bytes` is by default what tables leave free when they are away."""
    tables = plan.work.tables
    whole = sum(_record(table) * table.rows for table in tables)
    free = plan.memory.limit - (plan.memory.without_reuse - whole)
    cache = min(whole, free if cache_bytes is None else cache_bytes)
    kinds = [_kinds(table, plan) for table in tables]
    used_T = np.array([float(count_K @ use_K) for count_K, use_K in kinds])
    used = float(used_T.sum())
    moved = float(used_T @ [_record(table) for table in tables])
    record = moved / used
    if cache < moved:
        share, origin = 0.0, "the cache is smaller than the rows of a batch"
    elif served is not None:
        share, origin = served, "stated (--served)"
    else:
        count_K, use_K = map(np.concatenate, zip(*kinds))
        share = served_by(count_K, use_K, cache / record)
        popular = "spread evenly" if plan.skew.exponent is None else f"Zipf with exponent {plan.skew.exponent:g}"
        origin = f"estimated for ids {popular}; recperf data reuse counts those of a log"
    fetched = (1 - share) * used
    return {
        "table_bytes": whole,
        "cache_bytes": max(0.0, cache),
        "rows_per_step": used,
        "served": share,
        "origin": origin,
        "stores": {
            name: _stored(plan, device, store, fetched, fetched * record)
            for name, store in STORES.items()
            if cache >= moved
        },
    }


def served_by(count_K: Floats, use_K: Floats, slots: float) -> float:
    """The share of the rows of a step that a cache of so many rows holds already, once it is full: of `count_K` rows of
    each kind a step uses one with the probability `use_K`."""
    if slots >= count_K.sum():
        return 1.0
    never_K = np.log1p(-np.minimum(use_K, 1 - 1e-15))

    def held(steps: float) -> float:
        """Distinct rows of so many steps."""
        return float(count_K @ -np.expm1(steps * never_K))

    def served(steps: float) -> float:
        """The share of the rows of a step that one of so many steps before it used."""
        return 1.0 - float((count_K * use_K) @ np.exp(steps * never_K) / (count_K @ use_K))

    low, high = 0, 1 << 50
    while high - low > 1:
        steps = (low + high) // 2
        low, high = (steps, high) if held(steps) <= slots else (low, steps)
    # Of the oldest of these steps the cache holds some rows.
    part = min(1.0, (slots - held(low)) / max(1e-9, held(high) - held(low)))
    return (1 - part) * served(low) + part * served(high)


def _kinds(table: Table, plan: Prediction) -> tuple[Floats, Floats]:
    """How many rows each kind has, and the probability that a step uses one of them."""
    exponent, batch = plan.skew.exponent, plan.rank_batch
    if exponent is None or not table.skewed:
        used = min(float(table.rows), table.distinct(batch))
        return np.array([float(table.rows)]), np.array([used / table.rows])
    edges = np.unique(np.geomspace(1, table.rows + 1, KINDS).astype(np.int64))
    count_K = np.diff(edges).astype(np.float64)
    share_K = np.add.reduceat(popularity(table.rows, exponent), edges[:-1] - 1) / count_K
    return count_K, -np.expm1(table.ids * batch * np.log1p(-np.minimum(share_K, 1 - 1e-15)))


def _stored(plan: Prediction, device: Device, store: Store, rows: float, bytes_: float) -> dict[str, Any]:
    """Rows come and as many go: over the link both ways at once, in the store one after the other."""
    seconds = {
        "the device": plan.seconds,
        "the link": bytes_ / device.host_bytes_per_s,
        store.limit: rows / store.reads_per_s + bytes_ / store.read_bytes_per_s + bytes_ / store.write_bytes_per_s,
    }
    limit = max(seconds, key=lambda name: seconds[name])
    step = seconds[limit]
    return {
        "rows": rows,
        "bytes_each_way": bytes_,
        "parts": seconds,
        "seconds": step,
        "samples_per_s": plan.global_batch / step,
        "limit": limit,
        "origin": store.origin,
    }


def _record(table: Table) -> int:
    """Bytes of a row with its optimizer state."""
    return FLOAT * (table.dim + table.state)
