"""Steps of dlrm-v4 on one, two and four gloo ranks of this machine, and the ceilings their prediction rests on.

Every rank computes with one thread. Ceilings are those of one core, measured as `recperf peaks` does; what a message
costs is measured between two ranks, and predictions for four use that too.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from recperf.distributed.config import DistributedConfig
from recperf.measure.spans import phase_of
from recperf.models.dlrm_v4.config import HSTUConfig
from recperf.models.dlrm_v4.config import laptop as small_model
from recperf.plan.devices import Device, Efficiency, Network, Rates, from_peaks
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig, laptop

WARM_UP, LEAST_BYTES, MOST_BYTES = 4, 1 << 10, 1 << 24
SEED = 1
PARTS = ("input", "lookup", "forward", "backward", "reduce", "update")
"""Of a step that ranks time, in their order."""


def config(batch: int) -> DLRMv4WorkloadConfig:
    """Large enough that arithmetic, not the calls around it, takes most of the time; small enough for two cores. Ids
    travel in their own step, as the prediction has it: behind a short step nothing is hidden on shared cores."""
    made = laptop()
    layers = HSTUConfig(layers=2, dim=64, heads=2, qk_dim=32, v_dim=32, max_length=128, dropout=0.0)
    model = replace(small_model(), hstu=layers, table_dim=64, encoder_hidden=64)
    history = replace(made.data.history, length=112, scan=800)
    train = replace(made.train, batch_size=batch, device="cpu", threads=1)
    rows = DistributedConfig(sharding=",".join(f"{name}=row" for name in model.tables), pipeline=False)
    return replace(made, data=replace(made.data, history=history), model=model, train=train, distributed=rows)


def group_of(span: str) -> str:
    """The part of a step that a span belongs to; time outside of all spans counts as forward."""
    if span in ("data", "embedding", "reduce"):
        return {"data": "input", "embedding": "lookup", "reduce": "reduce"}[span]
    phase = phase_of(span)
    return phase if phase in ("backward", "update") else "forward"


@dataclass(frozen=True)
class Steps:
    """What ranks measured."""

    ranks: int
    seconds: list[float]
    """Of each step, the mean of the ranks."""
    parts: dict[str, float]
    """Medians by group."""
    spans: dict[str, float]
    """And by span."""
    messages: dict[str, float]
    """Seconds of small and large collective calls."""


def measured(ranks: int, made: DLRMv4WorkloadConfig, steps: int) -> Steps:
    """Start the ranks, take steps, wait for all."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OMP_NUM_THREADS"] = "1"
        files = [Path(folder) / f"rank-{rank}.pickle" for rank in range(ranks)]
        words = (ranks, f"{folder}/meeting", made, steps)
        processes = [context.Process(target=_rank, args=(rank, files[rank], *words)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"ranks ended with {[process.exitcode for process in processes]}")
        found = [pickle.loads(file.read_bytes()) for file in files]
    walls = [sum(one["steps"][number][0] for one in found) / ranks for number in range(steps)]
    names = sorted({name for one in found for _, parts in one["steps"] for name in parts})

    def middle(chosen: Callable[[str], bool]) -> float:
        """Of the ranks' mean in each step."""
        return float(
            median(
                sum(ns for one in found for name, ns in one["steps"][number][1].items() if chosen(name)) * 1e-9 / ranks
                for number in range(steps)
            )
        )

    parts = {group: middle(lambda name, group=group: group_of(name) == group) for group in PARTS}  # type: ignore[misc]
    spans = {one: middle(one.__eq__) for one in names}
    return Steps(ranks, walls, parts, spans, found[0]["messages"])


def _rank(rank: int, file: Path, ranks: int, meeting: str, made: DLRMv4WorkloadConfig, steps: int) -> None:
    import torch

    from recperf.distributed.ranks import Ranks, enter
    from recperf.measure.spans import StepClock
    from recperf.train.loop import take_step
    from recperf.workloads import find

    torch.set_num_threads(1)
    world = enter(Ranks(rank=rank, size=ranks, local_rank=rank, local_size=ranks))
    world.join("cpu", 300, init_method=f"file://{meeting}")
    messages = _messages(world) if ranks > 1 else {}
    trial: Any = find("dlrm-v4").prepare(made).trial(SEED)
    trial.model.train()
    batches, found = trial.recipe.order.batches(0), []
    for step in range(WARM_UP + steps):
        clock = StepClock()
        world.barrier()
        clock.begin()
        take_step(trial.recipe, batches, step)
        wall, parts = clock.end()
        found.append((wall * 1e-9, parts))
    file.write_bytes(pickle.dumps({"steps": found[WARM_UP:], "messages": messages}))
    world.barrier()
    # Torch's threads are not waited for.
    os._exit(0)


def _messages(world: Any) -> dict[str, float]:
    """Seconds of one call, small and large; the fastest of some, as for every ceiling."""
    import torch
    from torch import distributed

    def fastest(work: Callable[[], object], calls: int) -> float:
        seconds = []
        for _ in range(calls + 2):
            world.barrier()
            began = perf_counter()
            work()
            seconds.append(perf_counter() - began)
        return min(seconds[2:])

    found = {}
    for size, count, calls in (("small", LEAST_BYTES, 200), ("large", MOST_BYTES, 8)):
        sent, got = torch.ones(count // 4), torch.empty(count // 4)
        found[f"all-to-all, {size}"] = fastest(partial(distributed.all_to_all_single, got, sent), calls)
        found[f"all-reduce, {size}"] = fastest(partial(distributed.all_reduce, sent), calls)
    return found


def one_core() -> dict[str, Any]:
    """Ceilings of one thread, in a process of its own so that no other threads exist."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return dict(pool.apply(_one_core))


def _one_core() -> dict[str, Any]:
    import torch

    from recperf.measure.peaks import cpu
    from recperf.measure.peaks.sampling import QUICK, Sampler

    torch.set_num_threads(1)
    sampler = Sampler(QUICK)
    table = cpu.memory_table(QUICK, 64 << 20, lambda _: None)
    return {"gemm": {"float32": cpu.product(sampler, torch.float32)}, "copy": cpu.copy(sampler, table)}


def device(ceilings: dict[str, Any], two: Steps) -> tuple[Device, Network]:
    """This machine as a plan sees it: cores that ranks take or share, and messages between processes."""
    told = two.messages
    small, large = told["all-to-all, small"], told["all-to-all, large"]
    # Half of the bytes stay at home.
    rate = (MOST_BYTES - LEAST_BYTES) / 2 / (large - small)
    cores = len(os.sched_getaffinity(0))
    made = replace(
        from_peaks(ceilings), flops=Rates(float32=float(ceilings["gemm"]["float32"]["p50"])), cores=cores,
        link_bytes_per_s=rate, link="gloo", origin="measured here, one thread",
    )  # fmt: skip
    shares = Efficiency(products=0.8, bytes=0.5, link=1.0, origin="assumed; links measured")
    network = Network(
        name="gloo", bytes_per_s=rate, latency_s=small, link_latency_s=small, ranks_per_node=1 << 16,
        origin="measured between two ranks",
    )  # fmt: skip
    return replace(made, efficiency=shares), network
