"""Jobs of ranks in tests; every function runs on each rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rank_states import restore, whole_state

from recperf.distributed.config import Demand, DistributedConfig, Table
from recperf.distributed.ranks import Ranks
from recperf.distributed.shares import own_part
from recperf.distributed.step import RankStep
from recperf.distributed.tables import TorchRecTables
from recperf.errors import DataError, RecperfError
from recperf.execution.measuring import measure_window
from recperf.execution.workload import Workload, load
from recperf.models.dlrm_v4.config import DLRMv4Config, laptop
from recperf.models.tiers.config import TablesConfig
from recperf.train.device import applied
from recperf.train.loop import Position, take_step
from recperf.workloads import find
from recperf.workloads.dlrm.config import DLRMDataConfig, DLRMModelConfig, DLRMTrainConfig, DLRMWorkloadConfig
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig
from recperf.workloads.micro_dlrm.config import MicroDLRMConfig
from recperf.workloads.next_item.config import NextItemRunConfig
from recperf.workloads.torch_module.build import ModuleTrial

SEED = 3
sys.path.append(str(Path(__file__).parents[2] / "examples"))
MODULES: dict[str, Callable[[], Workload]] = {
    "WideAndDeepConfig": lambda: import_module("wide_and_deep").WIDE_AND_DEEP,
    "GRU4RecConfig": lambda: import_module("gru4rec").GRU4REC,
}
"""The torch modules of examples, by the name of their config."""


def python(rank: int, *, options: dict[str, Any]) -> None:
    """In place of a command: a program that trains from Python, twice, and says what it got."""
    from torch import distributed

    import recperf
    from recperf.distributed.ranks import current

    runs = [recperf.run("micro-dlrm", **options) for _ in range(2)]
    assert (current().size, distributed.is_initialized()) == (1, False)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        recperf.run("micro-dlrm", **options)
    except RecperfError as error:
        print(error.what)
    print(*(f"{run.folder.resolve()} {run.finished} {run.result.quality.metrics['auc']}" for run in runs), sep="\n")
    os._exit(0)


def small() -> DLRMv4Config:
    return replace(laptop(), table_dim=16, rows=tuple(range(40, 51)), row_scale=1.0)


def make(world: Ranks, sharding: str) -> TorchRecTables:
    return TorchRecTables(small_demand(16 // world.size), DistributedConfig(sharding=sharding), world, seed=SEED)


def small_demand(batch: int) -> Demand:
    """Two ids a sample and table, all of them distinct."""
    tables = (
        Table(name=name, rows=rows, dim=16, ids=2.0, vectors=2.0, distinct=lambda samples: 2.0 * samples)
        for name, rows in small().table_rows.items()
    )
    return Demand(tables=tuple(tables), batch=batch)


def dlrm(
    optimizer: str = "sgd", sharding: str = "", *, all_to_all: str = "fp32", batch: int = 29, ids: int = 5,
    tables: TablesConfig | None = None, **train: Any,
) -> DLRMWorkloadConfig:  # fmt: skip
    """Tables t1 to t4; batches that no number of ranks divides evenly."""
    options: dict[str, Any] = {"sharding": sharding, "all_to_all": all_to_all}
    fields: dict[str, Any] = {"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-2, **train}
    return DLRMWorkloadConfig(
        data=DLRMDataConfig(ids_per_bag=ids, batches=16, held_out_batches=2),
        model=DLRMModelConfig(rows=(30, 9, 200, 12), dim=8, bottom=(6, 8, 8), top=(8, 1)),
        train=DLRMTrainConfig(epochs=1, batch_size=batch, device="cpu", threads=1, **fields),
        distributed=DistributedConfig(**options),
        tables=tables or TablesConfig(),
    )


def prepared_of(config: Any) -> Any:
    kinds: dict[type, str] = {DLRMWorkloadConfig: "dlrm", MicroDLRMConfig: "micro-dlrm"}
    kinds |= {DLRMv4WorkloadConfig: "dlrm-v4", NextItemRunConfig: "hstu"}
    torch.manual_seed(SEED)
    name = type(config).__name__
    return (MODULES[name]() if name in MODULES else find(kinds[type(config)])).prepare(config)


def training(
    world: Ranks, config: Any, steps: int, state: dict[str, Any] | None = None, done: int = 0
) -> dict[str, Any]:
    """Some steps of a trial from the start or from a state: losses, scores, states before and after."""
    prepared = prepared_of(config)
    with applied(prepared.settings):
        trial = prepared.trial(SEED)
        if state is not None:
            restore(world, trial, state)
        first = whole_state(world, trial)
        batches, losses, samples, norms = trial.recipe.order.batches(0, done), [], [], []
        trial.recipe.model.train()
        for step in range(done, done + steps):
            loss, count = take_step(trial.recipe, batches, step, lambda norm: norms.append(float(norm)))
            losses.append(float(loss))
            samples.append(count)
        saved, batch = whole_state(world, trial), next(batches)
        trial.recipe.model.train(False)
        predictions = trial.predictions(Position(0, done + steps, done + steps))
        return {
            "losses": losses, "samples": samples, "norms": norms, "first": first, "state": saved,
            "logits": predictions.logits_N, "labels": predictions.labels_N, "metrics": trial.metrics(predictions),
            "seen": trial.recipe.training_metrics(), "plan": trial.ranks.plan() if world.size > 1 else "",
            "rows": trial.rows_of(own_part(batch)),
            "ranks": predictions.ranks_N,
            "moved": _moved(trial.tiers()),
            "dense": [parameter.detach().clone() for parameter in _dense(trial)],
        }  # fmt: skip


def _moved(tiers: Any) -> list[int]:
    """Rows that came back to the cache of this rank, and those that left it."""
    return [tiers.traffic.fetched, tiers.traffic.written_back] if tiers else []


def _dense(trial: Any) -> Any:
    model = trial.module if isinstance(trial, ModuleTrial) else trial.model
    return model.dense_parameters() if hasattr(model, "dense_parameters") else model.parameters()


def trainings(world: Ranks, configs: dict[str, Any], steps: int) -> dict[str, dict[str, Any]]:
    return {name: training(world, config, steps) for name, config in configs.items()}


def going_on(world: Ranks, configs: dict[str, Any], steps: int, states: dict[str, Any], done: int) -> dict[str, Any]:
    return {name: training(world, config, steps, states[name], done) for name, config in configs.items()}


def window(world: Ranks, config: Any, steps: int) -> dict[str, Any]:
    """The measured window of a trial."""
    prepared = prepared_of(config)
    with applied(prepared.settings):
        trial = prepared.trial(SEED)
        trial.recipe.model.train()
        return measure_window(prepared, trial, None, steps=steps).figures


def refused(world: Ranks, configs: list[Any]) -> list[list[str]]:
    errors = []
    for config in configs:
        try:
            # Without the meeting of the ranks after their data is read, which a rank that refuses never reaches.
            workload = find("dlrm" if isinstance(config, DLRMWorkloadConfig) else "micro-dlrm")
            load(workload.build)(config).trial(SEED)
        except RecperfError as error:
            errors.append([type(error).__name__, error.what])
        else:
            errors.append([])
    return errors


def fails(rank: int, at: int, how: str, on: int = 1) -> None:
    """Kill, terminate, freeze or fail a rank at a step."""
    step, seen = RankStep.__call__, [0]

    def failing(self: RankStep, *arguments: Any) -> Any:
        seen[0] += 1
        if rank == on and seen[0] == at:
            if how == "raise":
                raise DataError("this rank read nonsense", fix="read something else")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "freeze": signal.SIGSTOP}[how])
        return step(self, *arguments)

    RankStep.__call__ = failing  # type: ignore[method-assign]


def events(folder: Path) -> Path:
    from recperf.data.known.yambda import synthesize
    from recperf.data.known.yambda.yambda_like import YambdaLike

    if not folder.exists():
        synthesize.write_store(YambdaLike(users=24, events_per_user=40, items=60, genres=4, seed=3), folder)
    return folder


def sleeps(rank: int, seconds: float, on: int = 1) -> None:
    """A rank waits for its data in every step."""
    step = RankStep.__call__

    def slow(self: RankStep, batches: Iterator[Any], *options: Any) -> Any:
        def late() -> Iterator[Any]:
            time.sleep(seconds)
            yield next(batches)

        return step(self, late() if rank == on else batches, *options)

    RankStep.__call__ = slow  # type: ignore[method-assign]
