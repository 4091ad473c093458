"""Whole training steps of dlrm-v4 on one device: forward, backward, clipping, Adam, and row-wise Adagrad of the rows.

On a GPU: the published model with tables of about 40 GB, batch 1024, made-up batches whose lengths and distinct items
are like the benchmark's. With and without shared encoders and the last layer for the candidate alone; each in as many
micro-batches as counted memory asks for. The next batch is copied from pinned memory and prepared in a queue beside
the step's. A step that makes the host wait is an error. A reading is the time between the ends of two steps by the
device's own events; then some steps are taken with an event at every boundary of a span, for the budget. MFU is counted
FLOPs of matrix products, for the lengths and layers really asked for and nothing computed twice, over the best rate of
a bf16 product that was measured, and over the data sheet's. The default way is also taken with shorter histories, as
the published figure of the MLPerf reference had them.

On a CPU: the laptop preset, its rate, making ready included, and its peak resident memory.

Run as `python benchmarks/dlrm_v4_step.py`. Exits with 5 where a goal is missed; `--tiny` runs anywhere.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from _histories import MEAN, SHORTEST, made_up
from _hstu_peer import DATASHEET_TFLOPS, GEMM_TFLOPS, on_the_gpu
from _rows import record, row, show
from recperf.data.batch import HistoryBatch
from recperf.measure.clocks import EventClock
from recperf.measure.spans import StepClock, span
from recperf.models.dlrm_v4 import cost
from recperf.models.dlrm_v4.config import DLRMv4Config, gpu, laptop
from recperf.models.dlrm_v4.inputs import Inputs, prepare_parts
from recperf.models.dlrm_v4.memory import memory
from recperf.models.dlrm_v4.model import DLRMv4
from recperf.models.dlrm_v4.tables import DLRMv4Tables
from recperf.train.optim import AdamW

NAME = "dlrm_v4_step"
CLIP, RATE, EPS = 1.0, 1e-6, 1e-8
SEED = 3
ROOM = 0.88
"""Share of a GPU's memory that counted bytes may take; fragments and the libraries need some."""
GOAL_UNEXPLAINED = 0.05
"""Share of a step that no span covers."""
DEFAULT = "shared encoders, candidate only"
PUBLISHED: dict[str, Any] = {"who": "MLPerf reference", "device": "B200", "samples_per_s": 1621.0, "fill": 0.40}
"""A GPU of eight; `fill`: mean tokens of a row over the longest."""
MFU_CEILINGS = {"MFU": GEMM_TFLOPS, "MFU, data sheet": DATASHEET_TFLOPS}


@dataclass(frozen=True)
class Plan:
    """How much of it."""

    config: DLRMv4Config
    batch: int
    mean: float
    """Events of a history, on average."""
    shortest: int
    batches: int = 3
    """Made up beforehand and taken in turn."""
    warm_up: int = 3
    steps: int = 24
    budget_steps: int = 6
    title: str = ""
    """Appended to the names of the ways."""
    goal: float | None = None
    """Samples a second of the default way on one NVIDIA H200."""

    def ways(self) -> dict[str, DLRMv4Config]:
        """What a step saves by, both together, and neither."""
        plain = replace(self.config, shared_encoders=False, hstu=replace(self.config.hstu, candidate_only=False))
        return {
            DEFAULT: self.config,
            "candidate only": replace(self.config, shared_encoders=False),
            "neither": plain,
        }


class Adam(AdamW):
    """Without decay, AdamW is Adam."""

    betas = (0.95, 0.999)


def loads_of(parts: list[Inputs], config: DLRMv4Config) -> list[cost.Load]:
    """What the parts of a batch cost; reads them on the host."""
    found = []
    for part in parts:
        lengths = part.offsets_B1.diff().tolist()
        found.append(cost.load_of(config, lengths, triples=part.entities["item_id"].index_N.numel()))
    return found


def parts_that_fit(config: DLRMv4Config, batch: HistoryBatch, limit: float) -> int:
    """The fewest micro-batches, a power of two, whose counted memory stays below the limit."""
    lengths = [length + config.context_tokens + 1 for length in batch.history_offsets_B1.diff().tolist()]
    parts = 1
    while parts < len(lengths):
        edges = [len(lengths) * part // parts for part in range(parts + 1)]
        loads = [cost.load_of(config, lengths[low:high]) for low, high in zip(edges, edges[1:])]
        if sum(memory(config, loads).values()) <= limit:
            break
        parts *= 2
    return parts


class Trainer:
    """One way, trained on through all its readings."""

    last: torch.Tensor
    """The loss of the last micro-batch."""

    def __init__(self, config: DLRMv4Config, device: torch.device, *, tables: DLRMv4Tables | None = None) -> None:
        self.model = DLRMv4(config, seed=SEED, device=device, tables=tables)
        self.model.train()
        self.dense = self.model.dense_parameters()
        self.adam = Adam([(self.dense, 0.0)], eps=EPS)
        self.number = 0

    def step(self, parts: list[Inputs]) -> None:
        whole = sum(len(part) for part in parts)
        for index, part in enumerate(parts):
            self.model.set_step(SEED, self.number, index)
            loss = self.model.loss(part) * (len(part) / whole)
            loss.backward()
            self.last = loss.detach()
        with span("dense_update"):
            torch.nn.utils.clip_grad_norm_(self.dense, CLIP, foreach=True)
            self.adam.step(RATE)
        with span("sparse_update"):
            self.model.tables.update(RATE, EPS)
        self.number += 1


class Ahead:
    """Batches on a GPU, each made ready in a queue of its own while the step before it runs."""

    def __init__(self, batches: list[HistoryBatch], config: DLRMv4Config, parts: int, device: torch.device) -> None:
        self.batches = [batch.pin_memory() for batch in batches]
        self.config, self.parts, self.device = config, parts, device
        self.main, self.side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.taken, self.before = 0, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.coming = self._prepared()
        self.held: list[list[Inputs]] = []

    def next(self) -> list[Inputs]:
        with span("data"):
            self.main.wait_event(self.ready)
        self.held.append(self.coming)
        return self.coming

    def after(self, done: Any) -> None:
        """Prepare what comes next. `done` is queued behind the step that was just queued."""
        # What the step before that one read may be written over once it has ended, and not earlier.
        self.side.wait_event(self.before)
        del self.held[:-1]
        self.before = done
        self.coming = self._prepared()

    def _prepared(self) -> list[Inputs]:
        batch = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        with torch.cuda.stream(self.side):
            found = prepare_parts(batch.to(self.device, non_blocking=True), self.config, self.parts)
            self.ready.record(self.side)
        return found


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dataclass(frozen=True)
class Found:
    seconds: list[float]
    budget: dict[str, float]
    """Share of each span, the mean of several steps."""
    loads: list[list[cost.Load]]
    """Of every batch, its micro-batches."""
    rows: list[int]
    """Distinct rows of each batch."""
    first: float
    """Seconds of the first step, kernels compiled."""
    peak: int | None
    """Most bytes held: by torch on a GPU, resident on a CPU. There only the first way of a process can tell."""
    before: int | None = None
    """Resident before the model was built, torch loaded."""

    def flops(self, config: DLRMv4Config) -> float:
        """Of a step, the mean of the batches."""
        steps = [cost.step(config, loads, rows=rows) for loads, rows in zip(self.loads, self.rows)]
        return statistics.fmean(cost.model_flops(parts) for parts in steps)


def on_gpu(plan: Plan, config: DLRMv4Config, batches: list[HistoryBatch], parts: int, device: torch.device) -> Found:
    trainer, ahead = Trainer(config, device), Ahead(batches, config, parts, device)
    loads, rows, ends = [], [], []

    def take() -> None:
        taken = ahead.next()
        trainer.step(taken)
        done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        done.record()
        ends.append(done)

    began = perf_counter()
    take()
    torch.cuda.synchronize(device)
    first = perf_counter() - began
    ahead.after(ends[-1])
    for _ in range(max(plan.warm_up, len(batches)) - 1):
        take()
        ahead.after(ends[-1])
    for batch in batches:
        ready = prepare_parts(batch.to(device), config, parts)
        loads.append(loads_of(ready, config))
        rows.append(sum(rows_U.numel() for rows_U in ready[0].rows.values()))
    del ready
    torch.cuda.reset_peak_memory_stats(device)
    warm = len(ends)
    for _ in range(plan.steps + 1):
        with no_waiting():
            take()
        ahead.after(ends[-1])
    torch.cuda.synchronize(device)
    seconds = [begin.elapsed_time(end) * 1e-3 for begin, end in zip(ends[warm:], ends[warm + 1 :])]
    peak = torch.cuda.max_memory_allocated(device)
    clocks = [EventClock() for _ in range(plan.budget_steps)]
    for clock in clocks:
        clock.begin()
        with no_waiting():
            take()
        clock.close()
        ahead.after(ends[-1])
    # Read only now: waiting for one step would leave the next one's queue empty at its beginning.
    return Found(seconds, mean_shares([clock.read() for clock in clocks]), loads, rows, first, peak)


def on_cpu(plan: Plan, config: DLRMv4Config, batches: list[HistoryBatch]) -> Found:
    before, trainer = resident(), Trainer(config, torch.device("cpu"))
    loads, rows, seconds, budgets = [], [], [], []
    for batch in batches:
        parts = prepare_parts(batch, config, 1)
        loads.append(loads_of(parts, config))
        rows.append(sum(rows_U.numel() for rows_U in parts[0].rows.values()))
    for number in range(plan.warm_up + plan.steps + plan.budget_steps):
        clock = StepClock() if number >= plan.warm_up + plan.steps else None
        if clock:
            clock.begin()
        began = perf_counter()
        with span("data"):
            parts = prepare_parts(batches[number % len(batches)], config, 1)
        trainer.step(parts)
        if clock:
            budgets.append(clock.end())
        else:
            seconds.append(perf_counter() - began)
    return Found(seconds[plan.warm_up :], mean_shares(budgets), loads, rows, seconds[0], resident(), before)


def resident() -> int:
    """Bytes this process had in memory at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def mean_shares(budgets: list[tuple[int, dict[str, int]]]) -> dict[str, float]:
    """Of each span in the steps' whole time, the largest first."""
    whole, total = sum(wall for wall, _ in budgets), dict[str, int]()
    for _, parts in budgets:
        for name, ns in parts.items():
            total[name] = total.get(name, 0) + ns
    return {name: ns / whole for name, ns in sorted(total.items(), key=lambda part: -part[1])}


def entries_of(
    name: str, plan: Plan, config: DLRMv4Config, found: Found, parts: int, device: torch.device
) -> list[dict[str, Any]]:
    flops = found.flops(config)
    full = replace(config, hstu=replace(config.hstu, candidate_only=False))
    tokens = statistics.fmean(sum(load.tokens for load in loads) for loads in found.loads)
    at = {
        "way": name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "batch": plan.batch,
        "micro_batches": parts,
        "mean_history": plan.mean,
        "shortest_history": plan.shortest,
        "tokens": tokens,
        "fill": tokens / plan.batch / config.hstu.max_length,
        "distinct_rows": statistics.fmean(found.rows),
        "table_bytes": 4 * config.table_parameters,
        "precision": config.precision,
        "ms": statistics.median(found.seconds) * 1e3,
        "flops": flops,
        "dense_equivalent_flops": plan.batch * cost.published_flops(full.hstu, config.hstu.max_length),
        "budget": {part: round(share, 4) for part, share in found.budget.items()},
        "first_step_s": found.first,
        "counted_memory": max(sum(memory(config, loads).values()) for loads in found.loads),
        "host_waits": "an error" if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "published": PUBLISHED if device.type == "cuda" else None,
        "goal": plan.goal if name == DEFAULT and on_the_gpu(device) else None,
    }
    name += plan.title
    made = [
        row(NAME, name, "throughput", "samples/s", [plan.batch / one for one in found.seconds], at),
        row(NAME, name, "rate", "TFLOP/s", [flops / one / 1e12 for one in found.seconds], at),
        row(NAME, name, "unexplained", "share", [found.budget.get("other", 0.0)], at),
    ]
    if found.peak is not None:
        made.append(row(NAME, name, "peak memory", "GiB", [found.peak / 2**30], at | {"before": found.before}))
    for metric, ceiling in MFU_CEILINGS.items() if on_the_gpu(device) else ():
        shares = [flops / one / (ceiling * 1e12) for one in found.seconds]
        made.append(row(NAME, name, metric, "share", shares, at | {"ceiling_tflops": ceiling}))
    return made


def goals_missed(entries: list[dict[str, Any]]) -> list[str]:
    missed = []
    for entry in entries:
        name, metric, p50, goal = entry["variant"], entry["metric"], entry["p50"], entry["conditions"].get("goal")
        if metric == "unexplained" and p50 > GOAL_UNEXPLAINED:
            missed.append(f"{name}: {p50:.1%} of a step is unexplained, the goal is {GOAL_UNEXPLAINED:.0%}")
        if metric == "throughput" and goal is not None and p50 < goal:
            missed.append(f"{name}: {p50:,.0f} samples/s, the goal is {goal:,.0f}")
    return missed


def measure(plan: Plan, names: list[str], device: torch.device, room: float) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    batches = [
        made_up(plan.config, plan.batch, SEED + number, mean=plan.mean, shortest=plan.shortest)
        for number in range(plan.batches)
    ]
    for name, config in plan.ways().items():
        if names and name not in names:
            continue
        if device.type == "cuda":
            limit = room * torch.cuda.get_device_properties(device).total_memory
            parts = max(parts_that_fit(config, batch, limit) for batch in batches)
            found = on_gpu(plan, config, batches, parts, device)
            gc.collect()
            torch.cuda.empty_cache()
        else:
            parts, found = 1, on_cpu(plan, config, batches)
            if made:
                found = replace(found, peak=None)
        fresh = entries_of(name, plan, config, found, parts, device)
        made += fresh
        for entry in fresh:
            print(show(entry), flush=True)
        print("  " + ", ".join(f"{part} {share:.1%}" for part, share in found.budget.items()), flush=True)
    return made


def plans_of(options: argparse.Namespace, device: torch.device) -> list[tuple[Plan, list[str]]]:
    """Each with its ways; none: all."""
    if options.tiny:
        return [(Plan(laptop(), 6, 25, 10, batches=2, warm_up=1, steps=3, budget_steps=2), options.ways)]
    if device.type == "cpu":
        plan = Plan(laptop(), options.batch or 128, 30, 10, warm_up=5, steps=50, budget_steps=20)
        return [(plan, options.ways)]
    whole = Plan(gpu(), options.batch or 1024, MEAN, SHORTEST, steps=options.steps, goal=3500.0)
    tokens = PUBLISHED["fill"] * whole.config.hstu.max_length
    mean = round(tokens) - whole.config.context_tokens - 1
    short = replace(whole, mean=mean, title=f", mean of {tokens:,.0f} tokens", goal=PUBLISHED["samples_per_s"])
    default = not options.ways or DEFAULT in options.ways
    return [(whole, options.ways), *([(short, [DEFAULT])] if default else [])]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="whole training steps of dlrm-v4 on one device")
    parser.add_argument("--tiny", action="store_true", help="a small model on any device; no rows, no goals")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="samples of a step; 1024 on a GPU, 128 on a CPU")
    parser.add_argument("--steps", type=int, default=24, help="timed on a GPU")
    parser.add_argument("--room", type=float, default=ROOM, help="share of the GPU's memory to fill")
    parser.add_argument("--ways", nargs="+", default=[], choices=list(Plan(laptop(), 1, 1, 1).ways()))
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    options = parser.parse_args(words)
    device = torch.device(options.device)
    entries = []
    for plan, names in plans_of(options, device):
        entries += measure(plan, names, device, options.room)
    if options.tiny:
        return 0
    if not options.no_record:
        print(f"rows appended to {record(entries).name}")
    missed = goals_missed(entries)
    for line in missed:
        print(f"goal missed: {line}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
