"""Steps of dlrm-v4 on one, two and four gloo ranks of this machine, each with one thread, beside their predictions."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from _plan_reference import Point
from recperf.distributed.config import DistributedConfig
from recperf.measure.spans import phase_of
from recperf.models.dlrm_v4.config import HSTUConfig
from recperf.models.dlrm_v4.config import laptop as small_model
from recperf.plan.devices import from_peaks
from recperf.plan.network import NETWORKS
from recperf.plan.predict import predict
from recperf.plan.sharding import Parallelism
from recperf.plan.work import DatasetIds, RankIds
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig, laptop
from recperf.workloads.dlrm_v4.plan import ids_by_table, planned

WARM_UP = 4
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


def plain() -> DLRMv4WorkloadConfig:
    """The laptop preset on a CPU."""
    made = laptop()
    return replace(made, train=replace(made.train, device="cpu"))


def rank_points(steps: int) -> list[Point]:
    """A larger model on 1, 2 and 4 ranks, the laptop preset on 1 and 2."""
    from recperf.measure import peaks
    from recperf.plan import calibrate
    from recperf.plan.skew import counted

    load, ceilings = os.getloadavg()[0], peaks.require(None, print)
    points = []
    for name, made, counts in (("", config(128), (1, 2, 4)), ("laptop preset, ", plain(), (1, 2))):
        workload = planned(made)
        rates = calibrate.measure(workload.work(), made.train.batch_size // 2, print, on_cpu=True)
        device, network = rates.applied(from_peaks(ceilings), "float32"), rates.network() or NETWORKS["loopback"]
        for ranks in counts:
            options = made.distributed
            ids = counted(_ids(made, ranks, steps), workload.work(), ranks)
            parallelism = Parallelism(
                sharding="row",
                wire="fp32",
                pipelined=options.pipeline,
                overlapped=options.overlap == "on",
                balanced=options.balance,
            )
            plan = predict(workload, ranks, device, network, parallelism, skew=ids, history=ids.histories)
            taken = measured(ranks, made, steps)
            facts = {"load_before": load, "measured_ms": _ms(taken.parts), "exposed_ms": _ms(plan.step.exposed)}
            known, label = 1e3 * median(taken.seconds), f"{name}{ranks} gloo ranks"
            ms, factors = 1e3 * plan.step.value, plan.step.factors
            points.append(Point("gloo ranks", label, ms, known, "measured", "partly", factors, "ms", facts))
    return points


def _ids(made: DLRMv4WorkloadConfig, ranks: int, steps: int) -> DatasetIds:
    """The ids of the steps that are timed: the first histories of a dataset are shorter than most. Ranks take samples
    in turn here, since how they are dealt hardly changes the ids of one."""
    from recperf.workloads.dlrm_v4.build import PreparedHistories

    prepared = PreparedHistories(made)
    order = prepared.train_order()
    numbers = range(WARM_UP, WARM_UP + steps)

    def of_rank(number: int, rank: int) -> RankIds:
        batch = prepared.plain.batch(order.batch(number)[rank::ranks])
        return RankIds(ids_by_table(batch, made.model.table_rows), batch.history_offsets_B1.diff().numpy())

    def batches() -> Iterator[Iterator[RankIds]]:
        for number in numbers:
            yield (of_rank(number, rank) for rank in range(ranks))

    return DatasetIds(prepared.store.name, len(numbers), batches())


def _ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e3 * value, 3) for name, value in seconds.items()}


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

    def middle(chosen: Callable[[str], bool]) -> float:
        """Of the ranks' mean in each step."""
        return float(
            median(
                sum(ns for one in found for name, ns in one["steps"][number][1].items() if chosen(name)) * 1e-9 / ranks
                for number in range(steps)
            )
        )

    parts = {group: middle(lambda name, group=group: group_of(name) == group) for group in PARTS}  # type: ignore[misc]
    return Steps(ranks, walls, parts)


def _rank(rank: int, file: Path, ranks: int, meeting: str, made: DLRMv4WorkloadConfig, steps: int) -> None:
    import torch

    from recperf.distributed.ranks import Ranks, enter
    from recperf.measure.spans import StepClock
    from recperf.train.loop import take_step
    from recperf.workloads import find

    torch.set_num_threads(1)
    world = enter(Ranks(rank=rank, size=ranks, local_rank=rank, local_size=ranks))
    world.join("cpu", 300, init_method=f"file://{meeting}")
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
    file.write_bytes(pickle.dumps({"steps": found[WARM_UP:]}))
    world.barrier()
    # Torch's threads are not waited for.
    os._exit(0)
