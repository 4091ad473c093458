"""Every optimizer of tables trains every workload with tables: to the losses of plain torch, and through a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_peers import PEERS
from tiered_bags import dlrm, hashed
from torch import Tensor, nn

from recperf.data.streaming.config import HistoryConfig, WindowConfig
from recperf.errors import ConfigError
from recperf.models.tiers.config import TablesConfig
from recperf.ops.table_rules import RULES, RuleName
from recperf.train.checkpoint import CheckpointStore
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.dlrm_v4 import config as dlrm_v4
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.dlrm_v4.config import EventsConfig
from recperf.workloads.micro_dlrm import config as micro
from recperf.workloads.micro_dlrm.build import PreparedClicks
from recperf.workloads.micro_dlrm_dram.build import PreparedDram
from recperf.workloads.next_item import hstu
from recperf.workloads.next_item.build import PreparedSequences

STEPS, EPS = 6, 1e-12
"""Torch's optimizers add epsilon at other places, so that it must be negligible."""
ON_DEVICE = TablesConfig(placement="device")
IN_FILES = TablesConfig(placement="file", resident="128KiB")


def clicks(rule: RuleName) -> PreparedClicks:
    train = replace(micro.default().train, table_optimizer=rule, table_weight_decay=0.0, device="cpu", threads=1)
    return PreparedClicks(
        replace(micro.default(), train=replace(train, table_learning_rate=20.0 if rule == "sgd" else 0.05))
    )


def dram(rule: RuleName) -> PreparedDram:
    config = hashed(rule, ON_DEVICE).config
    return PreparedDram(replace(config, train=replace(config.train, table_weight_decay=0.0, clip=0.0)))


def sequences(rule: RuleName, loss: Any, tables: TablesConfig = ON_DEVICE) -> PreparedSequences:
    config = hstu.default()
    model = replace(config.model, dim=16, loss=loss, negatives=16, dropout=0.0)
    rates: Any = {"learning_rate": 0.01, "table_learning_rate": 0.02}
    train = replace(config.train, table_optimizer=rule, batch_size=8, device="cpu", threads=1, **rates)
    data = replace(config.data, users=60)
    return PreparedSequences(hstu.resolve(replace(config, data=data, model=model, train=train, tables=tables)))


def histories(rule: RuleName, tables: TablesConfig = ON_DEVICE) -> PreparedHistories:
    config = dlrm_v4.laptop()
    windows = WindowConfig(min_history=5, seconds=30 * 86_400)
    data = EventsConfig(events=3_000, history=HistoryConfig(length=12, scan=40), windows=windows, holdout_windows=2)
    train = replace(config.train, batch_size=64, table_optimizer=rule, warmup_steps=1, device="cpu")
    model = replace(config.model, row_scale=0.02)
    return PreparedHistories(replace(config, data=data, model=model, train=train, tables=tables))


WORKLOADS: dict[str, Callable[[Any], Any]] = {
    "micro-dlrm": clicks,
    "micro-dlrm-dram": dram,
    "dlrm": lambda rule: dlrm(rule, ON_DEVICE),
    "dlrm-v4": histories,
    "hstu, full softmax": lambda rule: sequences(rule, "full"),
    "hstu, sampled": lambda rule: sequences(rule, "sampled"),
}


def tables_of(trial: Any) -> Any:
    return trial.model.tables if isinstance(trial.prepared, PreparedHistories) else trial.optimizer.sparse.table


def precise(trial: Any) -> Any:
    """With a negligible epsilon."""
    if isinstance(trial.prepared, PreparedHistories):
        trial.model.tables.update = partial(trial.model.tables.update, eps=EPS)
    else:
        trial.optimizer.sparse.eps = EPS
    return trial


class DenseUpdates:
    """Updates tables from gradients of their size by an optimizer of plain torch for each."""

    def __init__(self, trial: Any, rule: RuleName) -> None:
        self.peers: dict[str, tuple[nn.Parameter, Any]] = {}
        self.rule, self.model = rule, trial.model
        self.tables = tables_of(trial)
        if isinstance(trial.prepared, PreparedHistories):
            trial.model.tables.update = self.histories
        else:
            trial.optimizer.sparse.step = self.stacked

    def histories(self, rate: float) -> None:
        for name, rows_U, _ in self.tables.gradients():
            self.update(name, self.tables.table(name), self.tables.dense_gradient(name), rows_U, rate)
        self.tables.forget()

    def stacked(self, rate: float, *, scale: float = 1.0) -> None:
        assert scale == 1.0
        gradient_RD, grouped = self.tables.dense_gradient(), self.tables.grouped()[0]
        rows_V = grouped.sorted_V if hasattr(grouped, "sorted_V") else grouped.rows_V
        self.update("all", self.tables.table_RD, gradient_RD, rows_V.unique(), rate)
        self.tables.forget()

    def update(self, name: str, table_RD: Tensor, gradient_RD: Tensor, rows_U: Tensor, rate: float) -> None:
        if name not in self.peers:
            # It has the memory of the table.
            weight = nn.Parameter(table_RD)
            self.peers[name] = weight, PEERS[self.rule](weight, EPS)
        weight, peer = self.peers[name]
        used = torch.sparse_coo_tensor(rows_U[None], gradient_RD[rows_U], gradient_RD.shape, check_invariants=True)
        weight.grad = used if RULES[self.rule].counts else gradient_RD
        peer.param_groups[0]["lr"] = float(rate)
        with torch.enable_grad():
            peer.step()


def losses_of(trial: Any, first: int = 0, last: int = STEPS) -> list[float]:
    trial.model.train()
    batches = trial.recipe.order.batches(0, first)
    with applied(trial.prepared.settings):
        return [float(take_step(trial.recipe, batches, step)[0]) for step in range(first, last)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_losses_are_those_of_plain_torch(workload: str, rule: RuleName) -> None:
    prepared = WORKLOADS[workload](rule)
    trial, dense, frozen = (prepared.trial(1) for _ in range(3))
    DenseUpdates(dense, rule)
    tables_of(frozen).requires_grad_(False)
    losses = losses_of(precise(trial))
    assert losses == pytest.approx(losses_of(dense), rel=1e-4)
    assert losses != pytest.approx(losses_of(frozen), rel=1e-4)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("make", [histories, lambda rule, tables: sequences(rule, "sampled", tables)])
def test_a_training_goes_on_with_the_same_bits_wherever_its_rows_lie(make: Any, rule: RuleName, tmp_path: Path) -> None:
    whole = losses_of(make(rule, ON_DEVICE).trial(1))
    places = {"device": ON_DEVICE, "files": IN_FILES}
    for before, after in (("device", "files"), ("files", "device"), ("files", "files")):
        trial, other = make(rule, places[before]).trial(1), make(rule, places[after]).trial(1)
        assert losses_of(trial, 0, 3) == whole[:3]
        store = CheckpointStore(folder=tmp_path / f"{before}-{after}", notice=print)
        store.save(3, {"trial": trial.state()}, best=False)
        saved = CheckpointStore(folder=store.folder, notice=print).load(into={"trial": other.state()})
        assert saved is not None
        other.restore(saved["trial"])
        assert losses_of(other, 3) == whole[3:]


def test_what_an_optimizer_cannot_serve_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="full softmax uses all 320 items in every step"):
        sequences("adagrad", "full", IN_FILES)
    with pytest.raises(ConfigError, match=r"0 with train\.table_optimizer adamw"):
        replace(micro.default().train, table_learning_rate=0.1)
    config = dlrm_v4.mlperf()
    train = replace(config.train, table_optimizer="adagrad")
    with pytest.raises(ConfigError, match=r"rowwise-adagrad with mlperf\.log"):
        replace(config, train=train, mlperf=replace(config.mlperf, log=True))
