"""An optimisation ladder for the table of micro-dlrm-dram: each rung alone against the plain way, predicted, measured
and checked for equal numbers.

Shapes: V ids, B bags, R rows, D width, U different rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...data.batch import ClickBatch
from ...execution.workload import require_memory
from ...measure.ceilings import Ceilings, ceilings_of
from ...measure.cost import FLOAT
from ...measure.peaks.other_work import DISTURBED, OtherWork
from ...models.tables import HashedTable
from ...ops.bag import native, reference
from ...ops.huge_pages import ask_for_huge_pages
from .build import PreparedDram
from .config import estimate

BATCHES = 12
SAMPLE = 4096
Range = tuple[float, float]
RATE, EPS = 0.01, 1e-8


@dataclass(frozen=True)
class Work:
    """What one batch asks of the table."""

    lookups: int
    unique: int
    bags: int
    row_bytes: int


@dataclass(frozen=True)
class Setting:
    """What the rungs work on: the table as any program would allocate it, and one batch's counts."""

    table_RD: Tensor
    huge_RD: Tensor
    half_RD: Tensor
    state_R: Tensor
    work: Work


@dataclass(frozen=True)
class Readings:
    """What the work of the rungs takes on this machine: the stored ceilings, and parts timed in turn with the rungs."""

    ceilings: Ceilings
    tlb: float
    """How much slower a lookup is in the largest table of the cache curve than in the first one beyond the knee."""
    lookup: float
    """ns a row of the plain lookup."""
    parts: dict[str, float]
    """ns of a unit of each of `_parts`."""

    def memory(self, row_bytes: int, whole_bytes: int) -> Range:
        """ns of a random row from memory: that of the fastest gather of the ceilings, and that of the plain lookup."""
        best = self.ceilings.row_ns(row_bytes)
        plain = self.lookup * best / self.ceilings.row_ns(whole_bytes)
        return min(best, plain), max(best, plain)

    def looked_up(self, kind: str, row_bytes: int, whole_bytes: int, best: float | None = None) -> Range:
        """ns a row of a lookup: from every miss hidden behind the instructions to none."""
        fast, slow = self.memory(row_bytes, whole_bytes)
        miss = max(0.0, slow - self.ceilings.row_ns(row_bytes, cached=True))
        return max(self.parts[kind], fast if best is None else best), self.parts[kind] + miss

    def copies(self, bytes_: int, row_bytes: int) -> Range:
        """ns of a random row of a temporary of this size: what exceeds the knee comes from memory."""
        missed = max(0.0, 1 - self.ceilings.knee / bytes_)
        cached = self.ceilings.row_ns(row_bytes, cached=True), self.parts["hot plain"]
        ends = zip(cached, self.memory(row_bytes, row_bytes))
        low, high = sorted((1 - missed) * hit + missed * miss for hit, miss in ends)
        return low, high

    def write(self, bytes_: int) -> Range:
        """ns to write a new tensor: into memory that the allocator kept, or with a page fault for each page."""
        c = self.ceilings
        return bytes_ * 1e9 / (c.cached if bytes_ <= c.stream_knee else c.copy), bytes_ * 1e9 / c.first_touch


@dataclass(frozen=True)
class Rung:
    name: str
    idea: str
    plain: str
    """Which plain way it is measured against: lookup or update."""
    predict: Callable[[Work, Readings], Range]
    """The least and the most ns that a batch should take, from counted work and the readings."""
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
    bags_V = torch.arange(s.work.bags).repeat_interleave(offsets_B1.diff(), output_size=rows_V.numel())[order_V]
    out_BD = torch.zeros(s.work.bags, s.table_RD.shape[1])
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


def _dedup_ns(w: Work, r: Readings) -> Range:
    """Find the different ids, copy each row, then look up every id in the copies."""
    size = w.unique * w.row_bytes
    return _total(
        (w.lookups, (r.parts["unique"],) * 2),
        (w.unique, r.memory(w.row_bytes, w.row_bytes)),
        (1, r.write(size)),
        (w.lookups, r.copies(size, w.row_bytes)),
    )


def _sorted_ns(w: Work, r: Readings) -> Range:
    """Sort the ids, copy every row (at best as fast as a stream) and add each copy to its bag."""
    stream = w.row_bytes * 1e9 / r.ceilings.copy
    chunks = -(-w.lookups // reference.CHUNK)
    return _total(
        (w.lookups, (r.parts["sort"],) * 2),
        (w.lookups, (stream, r.memory(w.row_bytes, w.row_bytes)[1])),
        (chunks, r.write(w.lookups * w.row_bytes // chunks)),
        (w.lookups, (r.parts["index_add_"],) * 2),
    )


def _half_ns(w: Work, r: Readings) -> Range:
    return _total((w.lookups, r.looked_up("hot bf16", w.row_bytes // 2, w.row_bytes)))


def _huge_ns(w: Work, r: Readings) -> Range:
    """At best all that larger tables lose beyond the knee comes back."""
    return _total((w.lookups, (r.lookup / r.tlb, r.lookup)))


def _prefetched_ns(w: Work, r: Readings) -> Range:
    """At best rows arrive as fast as a stream."""
    stream = w.row_bytes * 1e9 / r.ceilings.copy
    return _total((w.lookups, r.looked_up("hot prefetched", w.row_bytes, w.row_bytes, stream)))


def _fused_ns(w: Work, r: Readings) -> Range:
    """Sort, add gradients, update each different row. At best the stream of these rows hides behind the instructions or
    the other way round; at worst they come one after the other, each row a miss."""
    streams = 2 * w.unique * w.row_bytes * 1e9 / r.ceilings.copy
    repeated, distinct = r.parts["hot repeated update"], r.parts["hot distinct update"]
    instructions = w.lookups * repeated + w.unique * max(0.0, distinct - repeated)
    missed = w.unique * r.memory(w.row_bytes, w.row_bytes)[1]
    return max(instructions, streams), instructions + missed + streams


def _total(*parts: tuple[int, Range]) -> Range:
    """Each part is a count and the ns of one."""
    low, high = (sum(count * ns[end] for count, ns in parts) for end in (0, 1))
    return low, high


RUNGS = (
    Rung("dedup ids", "fetch each different row once, then pool from the copies", "lookup", _dedup_ns, _dedup),
    Rung("sorted ids", "visit rows in order of address", "lookup", _sorted_ns, _sorted),
    Rung("bf16 rows", "half the bytes a row", "lookup", _half_ns,
         lambda s, rows, offsets, _: _lookup(s.half_RD, rows, offsets).float(), 2e-2),
    Rung("huge pages", "2 MiB pages under the table, so that fewer lookups miss the TLB", "lookup",
         _huge_ns, lambda s, rows, offsets, _: _lookup(s.huge_RD, rows, offsets)),
    Rung("prefetched rows", "prefetch the rows of the next ids (C)", "lookup",
         _prefetched_ns, lambda s, rows, offsets, _: native.bag_sum(s.table_RD, rows, offsets), native=True),
    Rung("prefetch and huge pages", "prefetch over huge pages: what the default preset does", "lookup",
         _prefetched_ns, lambda s, rows, offsets, _: native.bag_sum(s.huge_RD, rows, offsets), native=True),
    Rung("fused update", "sum, Adagrad and write each row once (C)", "update",
         _fused_ns, lambda s, rows, offsets, gradient: _update(native, s, rows, offsets, gradient), 1e-4, True),
)  # fmt: skip


def climb(prepared: PreparedDram, peaks: dict[str, Any]) -> dict[str, Any]:
    """Every rung on fresh batches, in turn with the plain way."""
    require_memory(estimate(prepared.config), tables=2.5)
    ceilings = ceilings_of(peaks, threads=torch.get_num_threads())
    assert ceilings is not None
    setting, batches = _setting(prepared)
    rungs = [rung for rung in RUNGS if not rung.native or not isinstance(native.library(), str)]
    other_work = OtherWork()
    parts = _parts(setting, *batches[0], knee=ceilings.knee)
    seconds: dict[str, list[float]] = {name: [] for name in ("lookup", "update", *parts, *(r.name for r in rungs))}
    worst = dict.fromkeys((rung.name for rung in rungs), 0.0)
    for rows_V, offsets_B1, gradient_BD in batches:
        began = perf_counter()
        plain = {"lookup": _lookup(setting.table_RD, rows_V, offsets_B1)}
        seconds["lookup"].append(perf_counter() - began)
        began = perf_counter()
        _update(reference, setting, rows_V, offsets_B1, gradient_BD)
        seconds["update"].append(perf_counter() - began)
        plain["update"] = _moved(setting, rows_V)
        for name, (part, _) in parts.items():
            began = perf_counter()
            part()
            seconds[name].append(perf_counter() - began)
        for rung in rungs:
            began = perf_counter()
            output = rung.run(setting, rows_V, offsets_B1, gradient_BD)
            seconds[rung.name].append(perf_counter() - began)
            if rung.plain == "update":
                output = _moved(setting, rows_V)
            worst[rung.name] = max(worst[rung.name], _difference(output, plain[rung.plain]))
    lookup = _quantile(seconds["lookup"], 0.5) * 1e9 / setting.work.lookups
    parts_ns = {name: _quantile(seconds[name], 0.5) * 1e9 / count for name, (_, count) in parts.items()}
    readings = Readings(ceilings, tlb_loss(peaks["knee"]), lookup, parts_ns)
    rows = [report(rung, setting.work, readings, seconds, worst[rung.name]) for rung in rungs]
    others = other_work.share()
    rows = judged(rows, others)
    return {
        "schema": 2,
        "threads": ceilings.threads,
        "batches": len(batches),
        **asdict(setting.work),
        "plain_ms": {name: _quantile(seconds[name], 0.5) * 1e3 for name in ("lookup", "update")},
        "parts_ns": parts_ns,
        "other_work": others,
        "rungs": rows,
        "conclusion": conclude(rows, others),
    }


def report(rung: Rung, work: Work, readings: Readings, seconds: dict[str, list[float]], worst: float) -> dict[str, Any]:
    """One rung: its predicted range, what was measured, and whether the two agree."""
    plain, least_most = seconds[rung.plain], rung.predict(work, readings)
    ratios = [baseline / own for baseline, own in zip(plain, seconds[rung.name])]
    measured = {f"p{share}": _quantile(ratios, share / 100) for share in (20, 50, 80)}
    low = _quantile(plain, 0.2) * 1e9 / least_most[1]
    high = _quantile(plain, 0.8) * 1e9 / least_most[0]
    return {
        "name": rung.name,
        "idea": rung.idea,
        "against": rung.plain,
        "predicted": {"low": low, "high": high},
        "measured": measured,
        "as_predicted": low <= measured["p50"] <= high,
        "difference": worst,
        "tolerance": rung.tolerance,
        "equal": worst <= rung.tolerance,
    }


def judged(rungs: list[dict[str, Any]], other_work: float | None) -> list[dict[str, Any]]:
    """The rungs; beside much other work no prediction is judged."""
    if other_work is not None and other_work > DISTURBED:
        return [{**rung, "as_predicted": None} for rung in rungs]
    return rungs


def conclude(rungs: list[dict[str, Any]], other_work: float | None) -> str:
    """What is worth doing on this machine, and which predictions failed."""
    faster = sorted((rung for rung in rungs if rung["measured"]["p20"] > 1), key=lambda rung: -rung["measured"]["p50"])
    text = "Faster here: " + (", ".join(f"{r['name']} {r['measured']['p50']:.2g} x" for r in faster) or "nothing") + "."
    if other_work is not None and any(rung["as_predicted"] is None for rung in rungs):
        return f"{text} Predictions not judged: other work took {other_work:.0%} of the cores."
    failed = [
        f"{r['name']} (predicted {r['predicted']['low']:.2g} to {r['predicted']['high']:.2g} x, "
        f"measured {r['measured']['p50']:.2g} x)"
        for r in rungs
        if not r["as_predicted"]
    ]
    if failed:
        return f"{text} Prediction failed: {', '.join(failed)}."
    return f"{text} All {len(rungs)} predictions hold."


def tlb_loss(knee: dict[str, Any]) -> float:
    """See `Readings.tlb`; the part of it that is still the cache makes it an upper bound."""
    beyond = [point["p50"] for point in knee["points"] if point["table_bytes"] > knee["bytes"]]
    return max(1.0, beyond[-1] / beyond[0]) if beyond else 1.0


def _parts(
    s: Setting, rows_V: Tensor, offsets_B1: Tensor, gradient_BD: Tensor, *, knee: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """Work that the rungs contain and no ceiling tells: how to do it, and of how many ids or rows.

    Hot: all rows are in the cache, which leaves the instructions without the misses.
    """
    rows, dim, lookups = max(1, knee // 4 // s.work.row_bytes), s.table_RD.shape[1], s.work.lookups
    hot_RD, hot_V = s.table_RD[:rows].clone(), rows_V % min(rows, s.table_RD.shape[0])
    half_RD, part_V = hot_RD.bfloat16(), rows_V[: reference.CHUNK]
    part_ND, bags_N = s.table_RD.index_select(0, part_V), part_V % s.work.bags
    sums_BD = torch.zeros(s.work.bags, dim)
    parts: dict[str, tuple[Callable[[], object], int]] = {
        "hot plain": (lambda: _lookup(hot_RD, hot_V, offsets_B1), lookups),
        "hot bf16": (lambda: _lookup(half_RD, hot_V, offsets_B1).float(), lookups),
        "unique": (lambda: torch.unique(rows_V, return_inverse=True), lookups),
        "sort": (lambda: torch.sort(rows_V), lookups),
        "index_add_": (lambda: sums_BD.index_add_(0, bags_N, part_ND), part_V.numel()),
    }
    if isinstance(native.library(), str):
        return parts
    # As many as the cache holds, so that the call itself is a small part of each; fewer would not be shared by threads.
    count = min(max(4 * rows, native.SMALL), lookups)
    once_V, ends_B1 = torch.randperm(count, generator=torch.Generator().manual_seed(0)), offsets_B1.clamp(max=count)
    few = replace(s, table_RD=torch.ones(count, dim), state_R=torch.ones(count))
    return parts | {
        "hot prefetched": (lambda: native.bag_sum(hot_RD, hot_V, offsets_B1), lookups),
        "hot repeated update": (lambda: _update(native, few, hot_V % count, offsets_B1, gradient_BD), lookups),
        "hot distinct update": (lambda: _update(native, few, once_V, ends_B1, gradient_BD), count),
    }


def _setting(prepared: PreparedDram) -> tuple[Setting, list[tuple[Tensor, Tensor, Tensor]]]:
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
        work=Work(
            lookups=rows_V.numel(),
            unique=int(torch.unique(rows_V).numel()),
            bags=offsets_B1.numel() - 1,
            row_bytes=config.model.dim * FLOAT,
        ),
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


def _quantile(values: list[float], share: float) -> float:
    """Without the first value, which contains warm-up."""
    values = sorted(values[1:] or values)
    return values[round(share * (len(values) - 1))]
