"""How evenly ranks share the work of dlrm-v4's batches: samples dealt in turn (r, r + n, ...) and by counted work.

Simulated: FLOPs of the published model for drawn lengths, 128 samples a rank, on 2, 4, 8 and 64 ranks. Lengths are
Zipf-like (probability falling as length^-1.2), of the published mean (2,663 of at most 4,086) or uniform. A row is
the slowest rank's work over the mean of all ranks; the longest sample alone, or the n + 1 longest, bound what any deal
can reach. The last row is the slowest rank's work in turn over that by work: what a step gains at most.

Measured: 2 and 4 gloo ranks of this host train a small model on synthetic events, whose users' histories differ. Every
global batch is trained on twice, dealt in both ways, in alternating order. A rank's own time in a step is the time that
its thread computed, which excludes waiting; on a host with fewer cores than ranks only that can be compared. So the
slowest rank's own time is what a step takes between exchanges; throughput is not measured.

Run as `python benchmarks/rank_balance.py`; it starts the ranks itself, which need TorchRec. With `--tiny` it takes a
minute and keeps no rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from _histories import MEAN, SHORTEST
from _hstu_peer import jagged_lengths
from _ranks import join, start
from _rows import record, row, show
from recperf.data.yambda import synthesize
from recperf.data.yambda.config import HistoryConfig, WindowConfig
from recperf.data.yambda.synthesize.config import YambdaLike
from recperf.distributed.balance import deal, imbalance, stride
from recperf.distributed.library import require_torchrec
from recperf.distributed.ranks import Ranks
from recperf.errors import RecperfError
from recperf.measure.profile import endless
from recperf.models.dlrm_v4.config import mlperf
from recperf.models.dlrm_v4.cost import sample_flops
from recperf.train.loop import take_step
from recperf.workloads import find
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig, laptop

NAME = "rank_balance"
WAYS = ("in turn", "by work")
GAIN = "slowest rank, in turn / by work"
RANKS = (2, 4, 8, 64)
EACH = 128
"""Samples of a rank, on average: a global batch of 8,192 on 64 ranks."""
EXPONENT = 1.2
LONGEST = 4086


def zipf(count: int, seed: int) -> NDArray[np.int64]:
    lengths = np.arange(1, LONGEST + 1)
    chances = lengths**-EXPONENT
    return np.random.default_rng(seed).choice(lengths, count, p=chances / chances.sum())


def published(count: int, seed: int) -> NDArray[np.int64]:
    return np.asarray(jagged_lengths(count, SHORTEST, LONGEST, MEAN, seed).numpy())


def uniform(count: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(1, LONGEST + 1, count)


def bound(work_B: NDArray[np.float64], ranks: int) -> float:
    """What no deal can be better than: the longest sample, or the two shortest of the n + 1 longest, over the mean."""
    longest = np.sort(work_B)[::-1][: ranks + 1]
    least = max(longest[0], longest[-1] + longest[-2] if len(longest) > ranks else 0.0)
    return float(max(1.0, least / (work_B.sum() / ranks)))


def simulated(batches: int) -> list[dict[str, Any]]:
    model = mlperf()
    constant, linear, square = sample_flops(model)
    rows = []
    kinds: dict[str, Callable[[int, int], NDArray[np.int64]]] = {
        "zipf": zipf,
        "published": published,
        "uniform": uniform,
    }
    for name, lengths in kinds.items():
        for ranks in RANKS:
            values: dict[str, list[float]] = {way: [] for way in (*WAYS, "bound", "gain")}
            for seed in range(batches):
                tokens_B = lengths(EACH * ranks, seed) + model.context_tokens + 1.0
                work_B = constant + (linear + square * tokens_B) * tokens_B
                in_turn = imbalance(work_B, stride(len(work_B), ranks))
                by_work = imbalance(work_B, deal(work_B, ranks))
                measures = (in_turn, by_work, bound(work_B, ranks), in_turn / by_work)
                for way, value in zip(values, measures):
                    values[way].append(value)
            here = {"lengths": name, "ranks": ranks, "batch": EACH * ranks, "simulated": True}
            for way, numbers in values.items():
                metric = {"gain": GAIN, "bound": "lower bound"}.get(way, "slowest / mean")
                rows.append(row(NAME, f"{name}, {ranks} ranks, {way}", metric, "x", numbers, here))
    return rows


def skewed(folder: Path, tiny: bool) -> DLRMv4WorkloadConfig:
    """A small model on histories of 2 events to a thousand or more: attention is most of its work."""
    config, length = laptop(), 60 if tiny else 2000
    users = YambdaLike(users=30, events_per_user=60 if tiny else 1500, items=3000)
    if not folder.exists():
        synthesize.write_store(users, folder)
    hstu = replace(config.model.hstu, dim=64, qk_dim=32, v_dim=32, max_length=length + 16)
    return replace(
        config,
        data=replace(
            config.data,
            path=folder,
            history=HistoryConfig(length=length, scan=length, strategy="last-n"),
            windows=WindowConfig(seconds=config.data.windows.seconds, min_history=2, shuffle=1.0),
        ),
        model=replace(config.model, hstu=hstu, positions=length + 16),
        train=replace(config.train, batch_size=64),
        distributed=replace(config.distributed, pipeline=False),
    )


def measured(world: Ranks, folder: Path, tiny: bool, batches: int) -> list[dict[str, Any]]:
    """Own seconds of each rank in each step, both ways on the same batches."""
    config = world.leader_first(lambda: skewed(folder, tiny))
    trial: Any = world.leader_first(lambda: find("dlrm-v4").prepare(config)).trial(0)
    recipe, order = trial.recipe, trial.recipe.order
    iterators = {
        way: endless(replace(order, histories=replace(order.histories, balance=way == "by work")), 0) for way in WAYS
    }
    seconds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    recipe.model.train()
    for number in range(batches + 1):
        for way in sorted(WAYS, reverse=bool(number % 2)):
            world.barrier()
            began = thread_time()
            take_step(recipe, iterators[way], recipe.steps - 1)
            own = torch.tensor([thread_time() - began], dtype=torch.float64)
            if number:
                seconds[way].append(world.stack(own).view(-1).tolist())
            else:
                world.stack(own)
    here = {
        "ranks": world.size, "backend": world.backend, "batch": config.train.batch_size, "simulated": False,
        "history": config.data.history.length, "dim": config.model.dim,
    }  # fmt: skip
    rows, slowest = [], {}
    for way in WAYS:
        steps = np.array(seconds[way])
        slowest[way] = steps.max(1)
        variant = f"measured, {world.size} ranks, {way}"
        rows.append(row(NAME, variant, "slowest / mean", "x", (steps.max(1) / steps.mean(1)).tolist(), here))
        rows.append(row(NAME, variant, "slowest rank", "ms", (1e3 * steps.max(1)).tolist(), here))
    gains = (slowest["in turn"] / slowest["by work"]).tolist()
    rows.append(row(NAME, f"measured, {world.size} ranks, gain", GAIN, "x", gains, here))
    return rows


def keep(rows: list[dict[str, Any]], dry: bool) -> None:
    for entry in rows:
        print(show(entry))
    if not dry:
        print(f"rows appended to {record(rows)}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="few and small batches; no rows")
    parser.add_argument("--dry", action="store_true", help="print, keep no rows")
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.meeting:
        world = join(options.meeting)
        events = Path(options.meeting).parent / "events"
        rows = measured(world, events, options.tiny, 4 if options.tiny else 30)
        if world.is_leader:
            keep(rows, options.dry or options.tiny)
        world.barrier()
        world.leave()
        return 0
    keep(simulated(3 if options.tiny else 50), options.dry or options.tiny)
    try:
        require_torchrec()
    except RecperfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    return next(filter(None, (start(ranks) for ranks in (2, 4))), 0)


if __name__ == "__main__":
    sys.exit(main())
