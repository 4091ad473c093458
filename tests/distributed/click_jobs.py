"""What ranks of the click models do in tests; every function is called on each of them."""

from __future__ import annotations

from typing import Any

from rank_states import restore, whole_state

from recperf.distributed.config import DistributedConfig
from recperf.distributed.ranks import Ranks
from recperf.distributed.shares import own_part
from recperf.errors import RecperfError
from recperf.execution.measuring import measure_window
from recperf.execution.workload import load
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads import find
from recperf.workloads.dlrm.config import DLRMDataConfig, DLRMModelConfig, DLRMTrainConfig, DLRMWorkloadConfig

SEED = 3


def dlrm(
    optimizer: str = "sgd", sharding: str = "", *, all_to_all: str = "fp32", placement: str = "", batch: int = 29,
    ids: int = 5, **train: Any,
) -> DLRMWorkloadConfig:  # fmt: skip
    """Tables t1 to t4; batches that no number of ranks divides evenly."""
    options: dict[str, Any] = {"sharding": sharding, "all_to_all": all_to_all, "placement": placement}
    fields: dict[str, Any] = {"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-2, **train}
    return DLRMWorkloadConfig(
        data=DLRMDataConfig(ids_per_bag=ids, batches=16, held_out_batches=2),
        model=DLRMModelConfig(rows=(30, 9, 200, 12), dim=8, bottom=(6, 8, 8), top=(8, 1)),
        train=DLRMTrainConfig(epochs=1, batch_size=batch, device="cpu", threads=1, **fields),
        distributed=DistributedConfig(**options),
    )


def prepared_of(config: Any) -> Any:
    return find("dlrm" if isinstance(config, DLRMWorkloadConfig) else "micro-dlrm").prepare(config)


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
        batches, losses, samples = trial.recipe.order.batches(0, done), [], []
        trial.recipe.model.train()
        for step in range(done, done + steps):
            loss, count = take_step(trial.recipe, batches, step)
            losses.append(float(loss))
            samples.append(count)
        batch = next(batches)
        predictions = trial.predictions()
        return {
            "losses": losses, "samples": samples, "first": first, "state": whole_state(world, trial),
            "logits": predictions.logits_N, "labels": predictions.labels_N, "metrics": trial.metrics(predictions),
            "plan": trial.plan() if world.size > 1 else "", "rows": trial.rows_of(own_part(batch)),
            "dense": [parameter.detach().clone() for parameter in trial.model.dense_parameters()],
        }  # fmt: skip


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
        return measure_window(prepared, trial, None, steps=steps)[0]


def refused(world: Ranks, configs: list[Any]) -> list[list[str]]:
    errors = []
    for config in configs:
        try:
            # Without the meeting of the ranks after their data is read, which a rank that refuses never reaches.
            workload = find("dlrm" if isinstance(config, DLRMWorkloadConfig) else "micro-dlrm")
            load(workload.ranks or workload.build)(config).trial(SEED)
        except RecperfError as error:
            errors.append([type(error).__name__, error.what])
        else:
            errors.append([])
    return errors
