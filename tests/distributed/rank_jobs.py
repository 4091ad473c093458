"""Jobs of ranks in tests; every function runs on each rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_states import restore, whole_state
from torch import Tensor

from recperf.distributed.config import Demand, DistributedConfig, Table
from recperf.distributed.ranks import Ranks
from recperf.distributed.step import RankStep
from recperf.distributed.tables import TorchRecTables
from recperf.errors import DataError
from recperf.models.dlrm_v4.config import DLRMv4Config, laptop
from recperf.train.loop import Position, take_step
from recperf.workloads import find
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig

SEED = 3


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


def training(
    world: Ranks, config: DLRMv4WorkloadConfig, steps: int, state: dict[str, Any] | None = None, done: int = 0
) -> dict[str, Any]:
    """Some steps of a trial from the start or from a state: losses, scores, the state."""
    trial = find("dlrm-v4").prepare(config).trial(SEED)
    if state is not None:
        restore(world, trial, state)
    batches, losses, samples, norms = trial.recipe.order.batches(0, done), [], [], []
    trial.model.train()
    for step in range(done, done + steps):
        loss, count = take_step(trial.recipe, batches, step, lambda norm: norms.append(float(norm)))
        losses.append(float(loss))
        samples.append(count)
    saved = whole_state(world, trial)
    logits, labels = _predicted(trial)
    metrics = trial.metrics(trial.predictions(Position(0, done + steps, done + steps)))
    seen = trial.recipe.training_metrics()
    dense = [parameter.detach().clone() for parameter in trial.model.dense_parameters()]
    return {
        "losses": losses, "samples": samples, "state": saved, "metrics": metrics, "seen": seen, "logits": logits,
        "labels": labels, "dense": dense, "norms": norms,
    }  # fmt: skip


def trainings(world: Ranks, configs: dict[str, DLRMv4WorkloadConfig], steps: int) -> dict[str, dict[str, Any]]:
    return {name: training(world, config, steps) for name, config in configs.items()}


@torch.no_grad()
def _predicted(trial: Any) -> tuple[Tensor, Tensor]:
    trial.model.eval()
    inputs = trial.inputs(trial.prepared.valid_order(trial.prepared.holdout))
    scores: tuple[Tensor, Tensor] = trial.evaluations.predicted(inputs, iter(inputs.loader()))
    return scores


def fails(rank: int, at: int, how: str, on: int = 1) -> None:
    """Kill, terminate, freeze or fail a rank at a step."""
    step, seen = RankStep.__call__, [0]

    def failing(self: RankStep, *arguments: Any) -> Any:
        seen[0] += 1
        if rank == on and seen[0] == at:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "raise":
                raise DataError("this rank read nonsense", fix="read something else")
        return step(self, *arguments)

    RankStep.__call__ = failing  # type: ignore[method-assign]


def events(folder: Path) -> Path:
    from recperf.data.yambda import synthesize
    from recperf.data.yambda.synthesize.config import YambdaLike

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
