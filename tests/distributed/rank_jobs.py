"""Jobs of ranks in tests; every function runs on each rank."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from rank_states import restore, whole, whole_state
from torch import Tensor

from recperf.distributed.config import Demand, DistributedConfig, Table
from recperf.distributed.step import RankStep, Reduction
from recperf.distributed.tables import TorchRecTables
from recperf.distributed.world import World
from recperf.errors import DataError, RecperfError
from recperf.models.dlrm_v4.config import DLRMv4Config, laptop
from recperf.models.dlrm_v4.tables import DLRMv4Tables
from recperf.train.loop import Position, take_step
from recperf.workloads import find
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig

SEED, STEPS = 3, 3
TROUBLE = "trouble begins at "


def small() -> DLRMv4Config:
    return replace(laptop(), table_dim=16, rows=tuple(range(40, 51)), row_scale=1.0)


def make(world: World, sharding: str, all_to_all: str = "fp32", placement: str = "") -> TorchRecTables:
    options = DistributedConfig(sharding=sharding, all_to_all=all_to_all, placement=placement)  # type: ignore[arg-type]
    return TorchRecTables(small_demand(16 // world.size), options, world, seed=SEED)


def small_demand(batch: int) -> Demand:
    """Two ids a sample and table, all of them distinct."""
    tables = (
        Table(name=name, rows=rows, dim=16, ids=2.0, vectors=2.0, distinct=lambda samples: 2.0 * samples)
        for name, rows in small().table_rows.items()
    )
    return Demand(tables=tuple(tables), batch=batch)


def uses(step: int, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rows that a rank uses in a step, and their gradient; ranks share some rows."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    rows = {name: torch.randperm(count, generator=draw)[: 9 + rank] for name, count in small().table_rows.items()}
    return rows, {name: torch.randn(len(ids), 16, generator=draw) for name, ids in rows.items()}


def trained(world: World, sharding: str, all_to_all: str = "fp32") -> dict[str, Any]:
    """Tables before and after some updates, and the rows looked up in between."""
    tables = make(world, sharding, all_to_all)
    first, seen = whole(tables), []
    for step in range(STEPS):
        tables.set_rate(0.1 + step / 10)
        rows, gradients = uses(step, world.rank)
        leaves = tables.lookup(SimpleNamespace(rows=rows))  # type: ignore[arg-type]
        seen.append({name: leaf.detach().clone() for name, leaf in leaves.items()})
        for name, leaf in leaves.items():
            # A rank without a gradient still takes part.
            leaf.grad = None if step == 1 and world.rank == 1 else gradients[name]
        tables.update(0.1 + step / 10)
    return {"first": first, "seen": seen, "last": whole(tables), "parts": tables.parts}


def alone(ranks: int, config: DLRMv4Config | None = None) -> tuple[DLRMv4Tables, list[dict[str, Tensor]]]:
    """The same in a single process, and the tables before each step."""
    tables, before = DLRMv4Tables(config or small(), seed=SEED), []
    for step in range(STEPS):
        used = [uses(step, rank) for rank in range(ranks) if not (step == 1 and rank == 1)]
        before.append({name: tables.table(name).clone() for name in tables.names})
        rows = {name: torch.cat([ids[name] for ids, _ in used]).unique() for name in tables.names}
        for name, leaf in tables.lookup(SimpleNamespace(rows=rows)).items():  # type: ignore[arg-type]
            leaf.grad = torch.zeros_like(leaf)
            for ids, gradients in used:
                leaf.grad.index_add_(0, torch.searchsorted(rows[name], ids[name]), gradients[name])
        tables.update(0.1 + step / 10)
    return tables, before


def refused(world: World, **options: str) -> list[str]:
    try:
        make(world, **options)
    except RecperfError as error:
        return [type(error).__name__, error.what]
    return []


def training(
    world: World, config: DLRMv4WorkloadConfig, steps: int, state: dict[str, Any] | None = None, done: int = 0
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
    metrics = trial.score(Position(0, done + steps, done + steps))
    seen = trial.recipe.training_metrics()
    dense = [parameter.detach().clone() for parameter in trial.model.dense_parameters()]
    return {
        "losses": losses, "samples": samples, "state": saved, "metrics": metrics, "seen": seen, "logits": logits,
        "labels": labels, "dense": dense, "norms": norms,
    }  # fmt: skip


def trainings(world: World, configs: dict[str, DLRMv4WorkloadConfig], steps: int) -> dict[str, dict[str, Any]]:
    return {name: training(world, config, steps) for name, config in configs.items()}


@torch.no_grad()
def _predicted(trial: Any) -> tuple[Tensor, Tensor]:
    trial.model.eval()
    inputs = trial.inputs(trial.prepared.valid_order(trial.prepared.holdout))
    scores: tuple[Tensor, Tensor] = trial.evaluations.predicted(inputs, iter(inputs.loader()))
    return scores


def fails(rank: int, at: int, how: str, on: int = 1) -> None:
    """Kill, terminate, freeze or fail a rank at a step, or let it hang in the middle of one; it prints when."""
    step, seen = RankStep.__call__, [0]

    def failing(self: RankStep, *arguments: Any) -> Any:
        seen[0] += 1
        if rank == on and seen[0] == at:
            if how != "stop":  # A rank that is asked to stop prints nothing.
                print(f"{TROUBLE}{time.time()}", flush=True)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "hang":
                Reduction.__call__ = lambda *_: time.sleep(600)  # type: ignore[assignment,method-assign,return-value]
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


@dataclass(frozen=True)
class Slow:
    """Batches that arrive late."""

    order: Any
    seconds: float

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        for batch in self.order.batches(epoch, start):
            time.sleep(self.seconds)
            yield batch


def window(world: World, config: DLRMv4WorkloadConfig, steps: int, slow: int, seconds: float) -> dict[str, Any]:
    """The measured window of a trial, one rank of which waits for its data in every step."""
    from recperf.execution.measuring import TrainingSteps
    from recperf.measure.measuring import measure_steps

    prepared = find("dlrm-v4").prepare(config)
    trial = prepared.trial(SEED)
    order = trial.recipe.order
    recipe = replace(trial.recipe, order=Slow(order, seconds)) if world.rank == slow else trial.recipe
    trial.model.train()
    return measure_steps(TrainingSteps(prepared, trial, recipe), None, steps=steps)[0]


def sleeps(rank: int, seconds: float, on: int = 1) -> None:
    """A rank waits for its data in every step."""
    step = RankStep.__call__

    def slow(self: RankStep, batches: Iterator[Any], *options: Any) -> Any:
        def late() -> Iterator[Any]:
            time.sleep(seconds)
            yield next(batches)

        return step(self, late() if rank == on else batches, *options)

    RankStep.__call__ = slow  # type: ignore[method-assign]


def without_waiting(world: World, workload: str, config: Any, steps: int) -> list[float]:
    """Losses of steps, after as many as a warm-up, in which the host must not wait for the GPU. It may where it learns
    how many ids other ranks send; batches are made before."""
    from recperf.distributed.bags import BagTables
    from recperf.distributed.exchange import Prefetch
    from recperf.measure.profile import endless
    from recperf.train.device import applied

    def mode(name: str) -> None:
        if world.device == "cuda":
            torch.cuda.set_sync_debug_mode(name)

    def waiting(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            mode("default")
            try:
                return method(*arguments)
            finally:
                mode("error")

        return wrapped

    prepared = find(workload).prepare(config)
    losses = []
    with applied(prepared.settings), ExitStack() as stack:
        recipe = prepared.trial(SEED).recipe
        recipe.model.train()
        batches = iter(list(itertools.islice(endless(recipe.order, 0), 2 * steps)))
        for _ in range(steps):
            take_step(recipe, batches, 0)
        for kind, name in ((BagTables, "record"), (TorchRecTables, "lookup"), (Prefetch, "send_ahead")):
            stack.enter_context(mock.patch.object(kind, name, waiting(getattr(kind, name))))
        stack.callback(mode, "default")
        mode("error")
        for _ in range(steps):
            losses.append(take_step(recipe, batches, 0)[0])
    return [float(loss) for loss in losses]


def clocks(world: World, ahead_ns: int) -> dict[str, Any]:
    """How far a rank's clock is ahead of rank 0's: as if on two hosts, and as it is."""
    from recperf.distributed.waits import compare_clocks

    ahead = ahead_ns * world.rank
    apart = compare_clocks(world, here=f"host {world.rank}", now=lambda: time.monotonic_ns() + ahead)
    shared = compare_clocks(world)
    return {"apart": (apart.ahead_ns, apart.error_ns), "shared": (shared.ahead_ns, shared.error_ns)}


def starts(world: World, late: float, margin: float, rounds: int = 5) -> list[tuple[int, int]]:
    """When this rank came to a common start and when it left, several times; ranks hear of it one after the other."""
    from recperf.distributed import window

    class Slow(World):
        def maximum(self, value: int) -> int:
            largest = world.maximum(value)
            time.sleep(late * world.rank)
            return largest

    window.MARGIN_NS = int(margin * 1e9)
    together, moments = window.SharedWindow(world), []
    together.world = Slow()
    for _ in range(rounds):
        time.sleep(late * world.rank)
        came = time.monotonic_ns()
        together.meet()
        moments.append((came, time.monotonic_ns()))
    return moments
