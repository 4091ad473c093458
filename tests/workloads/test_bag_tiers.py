"""Tables of bags in tiers train to the same bits as tables in memory, whatever the optimizer and the depth."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recperf.data.config import DramDataConfig
from recperf.errors import ArgumentError, ConfigError
from recperf.models.tables import PlacedFeatures, SparseGradients
from recperf.models.tiers.config import TablesConfig
from recperf.train.checkpoint import CheckpointStore
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.dlrm.build import PreparedDLRM
from recperf.workloads.dlrm.config import DLRMDataConfig, DLRMModelConfig, DLRMWorkloadConfig, experiment
from recperf.workloads.micro_dlrm_dram import config as dram
from recperf.workloads.micro_dlrm_dram.build import PreparedDram

STEPS = 30
ROWS = (20_000, 3, 30_000)


def dlrm(optimizer: Any, tables: TablesConfig, *, parts: int = 1, embedding: Any = "auto") -> PreparedDLRM:
    model = DLRMModelConfig(rows=ROWS, dim=16, bottom=(4, 16), top=(16, 1), table_init_std=0.01 * (optimizer == "sgd"))
    train = replace(
        experiment().train, batch_size=64, optimizer=optimizer, max_steps=STEPS, device="cpu", micro_batches=parts
    )
    data = DLRMDataConfig(ids_per_bag=8, ids="zipf", held_out_batches=2)
    fast = replace(experiment().fast, embedding=embedding)
    return PreparedDLRM(DLRMWorkloadConfig(data=data, model=model, train=train, fast=fast, tables=tables))


def hashed(optimizer: Any, tables: TablesConfig) -> PreparedDram:
    config = dram.zipf()
    model = replace(config.model, rows=60_000, dim=16, bottom=(*config.model.bottom[:-1], 16))
    train = replace(
        config.train, batch_size=32, max_steps=STEPS, table_optimizer=optimizer, table_weight_decay=0.1, clip=0.1
    )
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
    assert tables.tiers is not None
    return tables.tiers.records({name: torch.arange(rows) for name, rows in tables.tiers.tables.items()})


def plain_records(trial: Any) -> Tensor:
    table_RD, state = trial.model.embeddings.table_RD, trial.optimizer.sparse.state_R
    return torch.cat([table_RD, *([] if state is None else [state.view(len(table_RD), -1)])], 1)


def small(depth: int) -> TablesConfig:
    return TablesConfig(placement="file", resident="256KiB", depth=depth)


def require_equal(build: Any, depths: tuple[int, ...]) -> None:
    losses, scores, trial = trained(build(TablesConfig(placement="device")))
    for depth in depths:
        tiered_losses, tiered_scores, tiered = trained(build(small(depth)))
        assert tiered_losses == losses
        assert torch.equal(tiered_scores, scores)
        assert torch.equal(tiered_records(tiered.model.embeddings), plain_records(trial))
        traffic = tiered.model.embeddings.tiers.traffic
        assert 0 < traffic.hits < traffic.rows
        assert traffic.fetched > 0


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise-adagrad"])
def test_dlrm_is_equal_to_the_bit(optimizer: str) -> None:
    require_equal(lambda tables: dlrm(optimizer, tables), (1, 3))


def test_dlrm_by_the_reference_and_in_micro_batches_is_equal_to_the_bit() -> None:
    require_equal(lambda tables: dlrm("rowwise-adagrad", tables, parts=3, embedding="plain"), (2,))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_hashed_table_is_equal_to_the_bit(optimizer: str) -> None:
    """With clipping, whose norm depends on the order in which rows are added."""
    require_equal(lambda tables: hashed(optimizer, tables), (1, 3))


@pytest.mark.parametrize("build", [lambda tables: dlrm("adagrad", tables), lambda tables: hashed("adagrad", tables)])
def test_a_checkpoint_is_resumed_into_any_placement(build: Any, tmp_path: Path) -> None:
    placements = TablesConfig(placement="device"), small(2)
    losses, _, whole = trained(build(placements[0]))
    for number, (before, after) in enumerate(product(placements, placements)):
        trial, other = build(before).trial(1), build(after).trial(1)
        store = CheckpointStore(folder=tmp_path / str(number), notice=print)
        for first, last in ((0, 5), (5, 15)):
            losses_of(trial, first, last)
            store.save(last, {"trial": trial.state()}, best=False)
        saved = CheckpointStore(folder=store.folder, notice=print).load(into={"trial": other.state()})
        assert saved is not None
        other.restore(saved["trial"])
        assert losses_of(other, 15, STEPS) == losses[15:]
        records = plain_records if after.placement == "device" else lambda one: tiered_records(one.model.embeddings)
        assert torch.equal(records(other), plain_records(whole))


def test_rows_of_a_placed_batch_are_those_of_the_table() -> None:
    prepared = dlrm("sgd", small(1))
    trial: Any = prepared.trial(1)
    batch, plain = next(trial.recipe.order.batches(0)), next(prepared.order(1).batches(0))
    assert isinstance(batch.features, PlacedFeatures)
    assert torch.equal(trial.rows_of(batch), trial.rows_of(plain))
    with pytest.raises(RuntimeError, match="one after the other"):
        trial.model.loss(batch)
    with pytest.raises(RuntimeError, match="placed"):
        trial.model.loss(plain).backward()
    plain.features.values_V[5] = ROWS[0]
    with pytest.raises(ArgumentError, match="20000"):
        trial.model.embeddings.place(plain.features, None)


def test_the_choice_is_recorded_and_adamw_is_refused() -> None:
    assert dlrm("sgd", TablesConfig()).settings.reasons["tables"].startswith("device: tables of 3.1 MiB fit")
    with pytest.raises(ConfigError, match="adamw") as error:
        dlrm("adamw", small(1))
    assert error.value.fix == "--train.optimizer rowwise-adagrad"
    assert dlrm("adamw", TablesConfig()).settings.reasons["tables"].startswith("device: adamw")


def test_tables_larger_than_memory_go_to_files(tmp_path: Path) -> None:
    """On a CPU `resident` is the memory that tables may take."""
    tables = TablesConfig(resident="8MiB", folder=tmp_path)
    prepared = dlrm("rowwise-adagrad", tables)
    model = replace(prepared.config.model, rows=(10_000_000, 3, 1_000_000), dim=16)
    assert PreparedDLRM(replace(prepared.config, model=model)).tiers.placement == "file"
