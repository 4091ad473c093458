"""An optimisation ladder for the table of micro-dlrm-dram: each rung alone against the plain way, predicted, measured
and checked for equal numbers.

Shapes: V ids, B bags, R rows, D width, U different rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...data.batch import ClickBatch
from ...execution.workload import require_memory
from ...measure.ceilings import row_time
from ...models.tables import HashedTable, ask_for_huge_pages
from ...ops.bag import native, reference
from .build import PreparedDram
from .config import estimate

BATCHES = 12
SAMPLE = 4096
RATE, EPS = 0.01, 1e-8


@dataclass(frozen=True)
class Setting:
    """What the rungs work on: the table as any program would allocate it, and one batch's facts."""

    table_RD: Tensor
    huge_RD: Tensor
    half_RD: Tensor
    state_R: Tensor
    lookups: int
    unique: int
    bags: int
    peaks: dict[str, Any]

    @property
    def row_bytes(self) -> int:
        return self.table_RD.shape[1] * 4


@dataclass(frozen=True)
class Rung:
    name: str
    idea: str
    plain: str
    """Which plain way it is measured against: lookup or update."""
    predict: Callable[[Setting, float], float]
    """The gain expected, from counted work and this machine's ceilings; given the baseline's seconds."""
    run: Callable[[Setting, Tensor, Tensor, Tensor], Tensor]
    """Called with rows, offsets and a gradient; returns what must equal the baseline's result."""
    tolerance: float = 1e-5
    native: bool = False
    """Needs the compiled file."""


def _lookup(table: Tensor, rows_V: Tensor, offsets_B1: Tensor) -> Tensor:
    return F.embedding_bag(rows_V, table, offsets_B1, mode="sum", include_last_offset=True)


def _dedup(s: Setting, rows_V: Tensor, offsets_B1: Tensor, _: Tensor) -> Tensor:
    rows_U, where_V = torch.unique(rows_V, return_inverse=True)
    return _lookup(s.table_RD.index_select(0, rows_U), where_V, offsets_B1)


def _sorted(s: Setting, rows_V: Tensor, offsets_B1: Tensor, _: Tensor) -> Tensor:
    sorted_V, order_V = torch.sort(rows_V)
    bags_V = torch.arange(s.bags).repeat_interleave(offsets_B1.diff(), output_size=rows_V.numel())[order_V]
    out_BD = torch.zeros(s.bags, s.table_RD.shape[1])
    for part in range(0, rows_V.numel(), reference.CHUNK):
        ids = slice(part, part + reference.CHUNK)
        out_BD.index_add_(0, bags_V[ids], s.table_RD.index_select(0, sorted_V[ids]))
    return out_BD


def _update(implementation: Any, s: Setting, rows_V: Tensor, offsets_B1: Tensor, gradient_BD: Tensor) -> Tensor:
    """One row-wise Adagrad step in place; the table is the result."""
    rows = s.table_RD.shape[0]
    grouped = implementation.Grouped(rows_V, offsets_B1, rows)
    s.state_R.fill_(1.0)
    implementation.update(s.table_RD, s.state_R, grouped, gradient_BD, rate=RATE, eps=EPS, decay=0.0, scale=1.0)
    return s.table_RD


def _row_gain(s: Setting, small: int) -> float:
    rows = s.peaks["gather"]["dram"]["rows"]
    whole, part = row_time(rows, s.row_bytes), row_time(rows, small)
    return whole / part if whole and part else 1.0


def _best_gather(s: Setting, seconds: float) -> float:
    """The plain way's time over that of the fastest random gather of such rows from memory this machine has shown."""
    row_ns = row_time(s.peaks["gather"]["dram"]["rows"], s.row_bytes)
    return seconds * 1e9 / (s.lookups * row_ns) if row_ns else 1.0


def _tlb_gain(s: Setting, _: float) -> float:
    """What a lookup loses between the first table past the last-level cache and the largest one measured."""
    points = s.peaks["knee"]["points"]
    last_level = max(s.peaks["machine"]["caches"].values(), default=32 << 20)
    past = [point["p50"] for point in points if point["table_bytes"] > last_level]
    return float(points[-1]["p50"] / past[0]) if past else 1.0


def _update_gain(s: Setting, _: float) -> float:
    """Bytes the plain update moves over those the fused one must."""
    dim = s.table_RD.shape[1]
    plain = dim * (2 * s.lookups + 2 * s.lookups + 8 * s.unique)
    return plain / (dim * (s.lookups + 2 * s.unique))


RUNGS = (
    Rung("dedup ids", "fetch each different row once, then pool from the copies", "lookup",
         lambda s, _: s.lookups / s.unique, _dedup),
    Rung("sorted ids", "visit rows in order of address", "lookup",
         lambda s, _: 1.0, _sorted),
    Rung("bf16 rows", "half the bytes a row", "lookup",
         lambda s, _: _row_gain(s, s.row_bytes // 2),
         lambda s, rows, offsets, _: _lookup(s.half_RD, rows, offsets).float(), 2e-2),
    Rung("huge pages", "2 MiB pages under the table, so that fewer lookups miss the TLB", "lookup",
         _tlb_gain, lambda s, rows, offsets, _: _lookup(s.huge_RD, rows, offsets)),
    Rung("prefetched rows", "prefetch the rows of the next ids (C)", "lookup",
         _best_gather, lambda s, rows, offsets, _: native.bag_sum(s.table_RD, rows, offsets), native=True),
    Rung("prefetch and huge pages", "prefetch over huge pages: what the default preset does", "lookup",
         _best_gather, lambda s, rows, offsets, _: native.bag_sum(s.huge_RD, rows, offsets), native=True),
    Rung("fused update", "sum, Adagrad and write each row once (C)", "update",
         _update_gain, lambda s, rows, offsets, gradient: _update(native, s, rows, offsets, gradient), 1e-4, True),
)  # fmt: skip


def climb(prepared: PreparedDram, peaks: dict[str, Any]) -> dict[str, Any]:
    """Every rung on fresh batches, in turn with the plain way."""
    require_memory(estimate(prepared.config), tables=2.5)
    setting, batches = _setting(prepared, peaks)
    rungs = [rung for rung in RUNGS if not rung.native or not isinstance(native.library(), str)]
    seconds: dict[str, list[float]] = {name: [] for name in ("lookup", "update", *(r.name for r in rungs))}
    worst = dict.fromkeys((rung.name for rung in rungs), 0.0)
    for rows_V, offsets_B1, gradient_BD in batches:
        began = perf_counter()
        plain = {"lookup": _lookup(setting.table_RD, rows_V, offsets_B1)}
        seconds["lookup"].append(perf_counter() - began)
        began = perf_counter()
        _update(reference, setting, rows_V, offsets_B1, gradient_BD)
        seconds["update"].append(perf_counter() - began)
        plain["update"] = _moved(setting, rows_V)
        for rung in rungs:
            began = perf_counter()
            output = rung.run(setting, rows_V, offsets_B1, gradient_BD)
            seconds[rung.name].append(perf_counter() - began)
            if rung.plain == "update":
                output = _moved(setting, rows_V)
            worst[rung.name] = max(worst[rung.name], _difference(output, plain[rung.plain]))
    return {
        "schema": 1,
        "batches": len(batches),
        "lookups": setting.lookups,
        "unique_rows": setting.unique,
        "row_bytes": setting.row_bytes,
        "plain_ms": {name: _median(seconds[name]) * 1e3 for name in ("lookup", "update")},
        "rungs": [_report(rung, setting, seconds, worst[rung.name]) for rung in rungs],
    }


def _report(rung: Rung, setting: Setting, seconds: dict[str, list[float]], worst: float) -> dict[str, Any]:
    ratios = sorted(
        baseline / rung_seconds for baseline, rung_seconds in zip(seconds[rung.plain][1:], seconds[rung.name][1:])
    )
    return {
        "name": rung.name,
        "idea": rung.idea,
        "against": rung.plain,
        "predicted": rung.predict(setting, _median(seconds[rung.plain])),
        "measured": {f"p{share}": ratios[round(share / 100 * (len(ratios) - 1))] for share in (20, 50, 80)},
        "difference": worst,
        "tolerance": rung.tolerance,
        "equal": worst <= rung.tolerance,
    }


def _setting(prepared: PreparedDram, peaks: dict[str, Any]) -> tuple[Setting, list[tuple[Tensor, Tensor, Tensor]]]:
    config = prepared.config
    table = HashedTable(config.model.features, prepared.rows, config.model.dim, seed=config.model.hash_seed,
                        bag="reference", huge_pages=False)  # fmt: skip
    table.reset(config.model.table_init_std, config.seed)
    huge_RD = torch.empty_like(table.table_RD)
    ask_for_huge_pages(huge_RD)
    huge_RD.copy_(table.table_RD)
    order, batches = prepared.order(config.seed).batches(0), []
    draw = torch.Generator().manual_seed(0)
    for _ in range(min(BATCHES, config.data.batches)):
        batch: ClickBatch = next(order)
        gradient_BD = torch.randn(batch.features.offsets_FB1.numel() - 1, config.model.dim, generator=draw)
        batches.append((table.rows_of(batch.features), batch.features.offsets_FB1, gradient_BD))
    rows_V, offsets_B1, _ = batches[0]
    setting = Setting(
        table_RD=table.table_RD,
        huge_RD=huge_RD,
        half_RD=table.table_RD.bfloat16(),
        state_R=torch.ones(prepared.rows),
        lookups=rows_V.numel(),
        unique=int(torch.unique(rows_V).numel()),
        bags=offsets_B1.numel() - 1,
        peaks=peaks,
    )
    return setting, batches


def _moved(setting: Setting, rows_V: Tensor) -> Tensor:
    """How far an update moved some of its rows; then they are put back, so that every way finds the same table."""
    before = setting.huge_RD.index_select(0, rows_V[:SAMPLE])
    moved = setting.table_RD.index_select(0, rows_V[:SAMPLE]) - before
    for part in torch.split(rows_V, reference.CHUNK):
        setting.table_RD.index_copy_(0, part, setting.huge_RD.index_select(0, part))
    return moved


def _difference(output: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest entry."""
    return float((output - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _median(values: list[float]) -> float:
    return sorted(values[1:] or values)[len(values[1:] or values) // 2]
