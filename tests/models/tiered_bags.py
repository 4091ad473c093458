"""Small trainings of dlrm and micro-dlrm-dram, with their tables on the device or in tiers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recperf.data.config import DramDataConfig
from recperf.models.tables import SparseGradients
from recperf.models.tiers.config import TablesConfig
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.dlrm.build import PreparedDLRM
from recperf.workloads.dlrm.config import DLRMDataConfig, DLRMModelConfig, DLRMWorkloadConfig, experiment
from recperf.workloads.micro_dlrm_dram import config as dram
from recperf.workloads.micro_dlrm_dram.build import PreparedDram

STEPS = 30
ROWS = (20_000, 3, 30_000)


def dlrm(
    optimizer: Any, tables: TablesConfig, *, parts: int = 1, embedding: Any = "auto", device: Any = "cpu"
) -> PreparedDLRM:
    model = DLRMModelConfig(rows=ROWS, dim=16, bottom=(4, 16), top=(16, 1), table_init_std=0.01 * (optimizer == "sgd"))
    train = replace(
        experiment().train, batch_size=64, optimizer=optimizer, max_steps=STEPS, device=device, micro_batches=parts
    )
    data = DLRMDataConfig(ids_per_bag=8, ids="zipf", held_out_batches=2)
    fast = replace(experiment().fast, embedding=embedding, graph="off")
    return PreparedDLRM(DLRMWorkloadConfig(data=data, model=model, train=train, fast=fast, tables=tables))


def hashed(optimizer: Any, tables: TablesConfig, *, device: Any = "cpu") -> PreparedDram:
    config = dram.zipf()
    model = replace(config.model, rows=60_000, dim=16, bottom=(*config.model.bottom[:-1], 16))
    train = replace(
        config.train, batch_size=32, max_steps=STEPS, table_optimizer=optimizer, table_weight_decay=0.1, clip=0.1,
        device=device,
    )  # fmt: skip
    data = DramDataConfig(ids="zipf", ids_per_bag=8, id_space=1 << 16, held_out_batches=2)
    return PreparedDram(replace(config, model=model, train=train, data=data, tables=tables))


def trained(prepared: PreparedDLRM | PreparedDram) -> tuple[list[float], Tensor, Any]:
    """The losses of a few steps, the scores after them, and the trial."""
    trial: Any = prepared.trial(1)
    losses = losses_of(trial, 0, STEPS)
    with applied(prepared.settings):
        return losses, trial.predictions().logits_N, trial


def losses_of(trial: Any, first: int, last: int) -> list[float]:
    trial.model.train()
    batches = trial.recipe.order.batches(0, first)
    with applied(trial.prepared.settings):
        return [float(take_step(trial.recipe, batches, step)[0]) for step in range(first, last)]


def tiered_records(tables: SparseGradients) -> Tensor:
    """Weights and optimizer state of all rows, read where they lie."""
    tiers = tables.tiers
    assert tiers is not None
    return tiers.records({name: torch.arange(rows, device=tiers.device) for name, rows in tiers.tables.items()})


def plain_records(trial: Any) -> Tensor:
    table_RD, state = trial.model.embeddings.table_RD, trial.optimizer.sparse.state
    return torch.cat([table_RD, *([] if state is None else [state.view(len(table_RD), -1)])], 1)
