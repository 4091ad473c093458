"""Whether memory is enough, of one process and of ranks that share a host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from recperf.distributed.config import DistributedConfig
from recperf.distributed.ranks import Ranks, current, enter
from recperf.errors import MachineError
from recperf.execution import tables
from recperf.execution import workload as base
from recperf.execution.tables import placed_tables
from recperf.models.tiers.config import TablesConfig
from recperf.workloads import find
from recperf.workloads.dlrm import config as dlrm
from recperf.workloads.dlrm_v4 import config as dlrm_v4
from recperf.workloads.micro_dlrm import config as micro_dlrm


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    before = current()
    yield
    enter(before)


def two_of(local: int) -> None:
    enter(Ranks(rank=0, size=2, local_size=local))


def room(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (base, tables):
        monkeypatch.setattr(module, "available_bytes", lambda: size)


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = base.Estimate(parameters={}, table_bytes=0, step={}, memory={"all": 600})
    room(monkeypatch, 1000)
    base.require_memory(estimate)
    two_of(1)
    base.require_memory(estimate)
    two_of(2)
    with pytest.raises(MachineError, match="by the 2 ranks of this host"):
        base.require_memory(estimate)


@pytest.mark.parametrize(
    ("kinds", "share", "on_host"),
    [("row", 0.5, 0.5), ("t1=row,t2=data-parallel", 0.8, 0.8), ("t1=table,t2=data-parallel", 1.0, 0.8),
     ("table", 0.6, 0.5)],
)  # fmt: skip
def test_the_fullest_rank_or_host_counts(kinds: str, share: float, on_host: float) -> None:
    config = dlrm.DLRMWorkloadConfig(
        model=dlrm.DLRMModelConfig(rows=(40, 60), dim=8, bottom=(6, 8), top=(8, 1)),
        distributed=DistributedConfig(sharding=kinds),
    )
    planned, options = dlrm.planned(config), config.distributed
    assert base.table_share(planned, options, on_host=False) == 1.0
    two_of(1)
    assert base.table_share(planned, options, on_host=False) == pytest.approx(share)
    assert base.table_share(planned, options, on_host=True) == pytest.approx(share)
    two_of(2)
    assert base.table_share(planned, options, on_host=True) == pytest.approx(on_host)


def test_dlrm_v4_counts_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for half of the tables on each rank, which is not enough for a copy of all."""
    config = dlrm_v4.laptop()
    config = replace(config, model=replace(config.model, row_scale=1.0))
    two_of(1)
    estimate = dlrm_v4.estimate(config)
    dense = 4 * config.model.dense_parameters
    # The fuller rank has the odd row of each table.
    odd = 4 * config.model.table_dim * len(config.model.tables)
    room(monkeypatch, sum(estimate.memory.values()) - estimate.table_bytes // 2 + dense + odd)
    find("dlrm-v4").check(config)
    copies = ",".join(f"{name}=data-parallel" for name in config.model.tables)
    with pytest.raises(MachineError, match="are needed"):
        find("dlrm-v4").check(replace(config, distributed=DistributedConfig(sharding=copies)))


def test_gradients_of_copied_tables_travel_in_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dlrm.experiment()
    adamw = replace(config, train=replace(config.train, optimizer="adamw", learning_rate=0.001))
    assert dlrm.reduction_bytes(adamw) == 0
    two_of(1)
    model = config.dlrm
    assert dlrm.reduction_bytes(config) == 4 * model.mlp_parameters
    assert dlrm.reduction_bytes(adamw) == 4 * (model.mlp_parameters + model.table_parameters)
    tiny = micro_dlrm.MicroDLRMConfig()
    room(monkeypatch, sum(micro_dlrm.estimate(tiny).memory.values()))
    with pytest.raises(MachineError, match="are needed"):
        find("micro-dlrm").check(tiny)
    enter(Ranks())
    find("micro-dlrm").check(tiny)


def test_tables_in_host_memory_need_it_for_their_index_too(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = base.Estimate(parameters={}, table_bytes=900, step={}, memory={"tables": 900}, table_rows=10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    tables, gpu = TablesConfig(placement="host"), torch.device("cuda")
    room(monkeypatch, 1100)
    assert placed_tables(tables, estimate, gpu).placement == "host"
    room(monkeypatch, 1000)
    with pytest.raises(MachineError, match=r"need 1\.0 KiB of host memory") as error:
        placed_tables(tables, estimate, gpu)
    assert error.value.fix == "--tables.placement file"
    assert "of disk are free" in placed_tables(replace(tables, placement="file"), estimate, gpu).why
