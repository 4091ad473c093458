"""What ranks do in tests of what travels between them, and when; every function is called on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from rank_jobs import SEED, STEPS, make, small, trained, uses
from rank_states import whole
from torch import Tensor, distributed

from recperf.distributed.world import World
from recperf.train.loop import Position, take_step
from recperf.workloads import find
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig


@contextmanager
def sent() -> Iterator[list[tuple[torch.dtype, int]]]:
    """The type and the count of what each all-to-all takes along, as they are begun."""
    found: list[tuple[torch.dtype, int]] = []
    before = distributed.all_to_all_single

    def noted(output: Tensor, input: Tensor, *words: Any, **named: Any) -> Any:
        found.append((input.dtype, input.numel()))
        return before(output, input, *words, **named)

    distributed.all_to_all_single = noted
    try:
        yield found
    finally:
        distributed.all_to_all_single = before


def looked_up(world: World, sharding: str, following: bool) -> dict[str, Any]:
    """What is sent by each lookup, each backward pass and a lookup without gradient in between; and what they find."""
    tables = make(world, sharding)
    batches = [SimpleNamespace(rows=uses(step, world.rank)[0]) for step in range(STEPS)]
    other = SimpleNamespace(rows=uses(9, world.rank)[0])
    told, seen = [], []
    for step, batch in enumerate(batches):
        tables.set_rate(0.1)
        last = step + 1 == STEPS
        tables.follow(None if last or not following else batches[step + 1])  # type: ignore[arg-type]
        with sent() as found:
            leaves = tables.lookup(batch)  # type: ignore[arg-type]
        told.append(list(found))
        seen.append({name: leaf.detach().clone() for name, leaf in leaves.items()})
        for name, leaf in leaves.items():
            leaf.grad = uses(step, world.rank)[1][name]
        tables.update(0.1)
        with torch.no_grad(), sent() as found:
            scored = tables.lookup(other)  # type: ignore[arg-type]
        told.append(list(found))
        seen.append({name: rows.clone() for name, rows in scored.items()})
    return {"told": told, "seen": seen, "last": whole(tables)}


def steps(world: World, config: DLRMv4WorkloadConfig, count: int) -> dict[str, Any]:
    """Steps with a score in the middle, after which the batches are asked for again from there."""
    trial = find("dlrm-v4").prepare(config).trial(SEED)
    batches, losses, samples, metrics = trial.recipe.order.batches(0), [], [], {}
    trial.model.train()
    for step in range(count):
        if step == count // 2:
            metrics = trial.score(Position(0, step, step))
            trial.model.train()
            batches = trial.recipe.order.batches(0, step)
        loss, taken = take_step(trial.recipe, batches, step)
        losses.append(float(loss))
        samples.append(taken)
    dense = [parameter.detach().clone() for parameter in trial.model.dense_parameters()]
    tables = whole(trial.rank_tables)
    return {"losses": losses, "samples": samples, "metrics": metrics, "dense": dense, "tables": tables,
            "seen": trial.recipe.training_metrics()}  # fmt: skip


def clicks(world: World, configs: dict[str, Any], count: int) -> dict[str, Any]:
    """The same of a click model, with how many messages of whole numbers each step sends."""
    result = {}
    for name, config in configs.items():
        trial = find("dlrm").prepare(config).trial(SEED)
        batches, losses, samples, told, metrics = trial.recipe.order.batches(0), [], [], [], {}
        for step in range(count):
            if step == count // 2:
                metrics = trial.score()
                batches = trial.recipe.order.batches(0, step)
            with sent() as found:
                loss, taken = take_step(trial.recipe, batches, step)
            losses.append(float(loss))
            samples.append(taken)
            told.append(sum(not kind.is_floating_point for kind, _ in found))
        result[name] = {"losses": losses, "samples": samples, "metrics": metrics, "told": told,
                        "tables": whole(trial.rank_tables)}  # fmt: skip
    return result


def precisions(world: World, sharding: str) -> dict[str, Any]:
    """Some updates with rows and gradients sent as each precision, and the types that really travelled."""
    found: dict[str, Any] = {}
    for precision in ("fp32", "fp16", "bf16"):
        with sent() as told:
            result = trained(world, sharding, precision)
        types = {kind for kind, _ in told if kind.is_floating_point}
        found[precision] = {**{name: result[name] for name in ("first", "seen", "last")}, "types": types}
    return found


def repeated(world: World) -> dict[str, Any]:
    """The same rows asked for once each, and as often as they occur: what is sent, and what comes back."""
    tables, draw = make(world, "row"), torch.Generator().manual_seed(world.rank)
    raw = {name: torch.randint(0, 6, (40,), generator=draw) for name in small().tables}
    distinct = {name: ids.unique(return_inverse=True) for name, ids in raw.items()}
    with torch.no_grad(), sent() as each:
        plain = tables.lookup(SimpleNamespace(rows=raw))  # type: ignore[arg-type]
    with torch.no_grad(), sent() as once:
        rows = {name: ids for name, (ids, _) in distinct.items()}
        found = tables.lookup(SimpleNamespace(rows=rows))  # type: ignore[arg-type]
    same = all(torch.equal(plain[name], found[name][inverse]) for name, (_, inverse) in distinct.items())
    return {"raw": sum(map(len, raw.values())), "distinct": sum(map(len, rows.values())), "each": list(each),
            "once": list(once), "same": same}  # fmt: skip
