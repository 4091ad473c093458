"""Whether memory is enough, of one process and of ranks that share a host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recperf.distributed.config import DistributedConfig
from recperf.distributed.ranks import Ranks, current, enter
from recperf.errors import MachineError
from recperf.execution import tables
from recperf.execution import workload as base
from recperf.workloads.dlrm import config as dlrm


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
    assert tables.table_share(planned, options, on_host=False) == 1.0
    two_of(1)
    assert tables.table_share(planned, options, on_host=False) == pytest.approx(share)
    assert tables.table_share(planned, options, on_host=True) == pytest.approx(share)
    two_of(2)
    assert tables.table_share(planned, options, on_host=True) == pytest.approx(on_host)
