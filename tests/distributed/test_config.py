"""The options of several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from recperf.distributed import ranks
from recperf.distributed.config import DistributedConfig
from recperf.distributed.ranks import Ranks
from recperf.errors import ConfigError
from recperf.runs.resume import fixed_fields
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig, laptop


@pytest.mark.parametrize(
    ("text", "message"),
    [("item_id=diagonal", "data-parallel"), ("item_id", "table=value"), ("=row", "table=value"),
     ("uid=row,uid=table", "listed twice"), ("uid=table-row", "row, column, table"), ("uid=row,table", "list it first"),
     ("row,table", "list it first")],
)  # fmt: skip
def test_an_unknown_sharding_names_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(sharding=text)


def test_an_unknown_table_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean 'item_id'") as caught:
        DLRMv4WorkloadConfig(distributed=DistributedConfig(sharding="item_ids=row"))
    assert "album_id" in caught.value.where["known"]


@pytest.mark.parametrize(
    ("option", "device", "threads", "reason"),
    [("auto", "cuda", 4, "on: a GPU sends while it computes"),
     ("auto", "cpu", 1, "on: the ranks of this host use 2 of 4"),
     ("auto", "cpu", 2, "off: the ranks of this host use 4 of 4"), ("on", "cpu", 2, "on: requested"),
     ("off", "cuda", 1, "off: requested")],
)  # fmt: skip
def test_gradients_are_summed_beside_the_backward_pass_where_something_is_free_to(
    monkeypatch: pytest.MonkeyPatch, option: Any, device: str, threads: int, reason: str
) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda: 4)
    world = Ranks(local_size=2, device=device)
    overlap, why = world.overlaps(DistributedConfig(overlap=option), threads)
    assert why.startswith(reason)
    assert overlap == why.startswith("on")


def test_a_resumed_run_may_be_sharded_differently() -> None:
    other = replace(
        laptop(),
        distributed=DistributedConfig(sharding="uid=row", timeout_s=9, pipeline=False, overlap="off", balance=False),
    )
    assert fixed_fields(other) == fixed_fields(laptop())
    # The precision of messages changes results.
    half = replace(laptop(), distributed=DistributedConfig(all_to_all="fp16"))
    assert fixed_fields(half) != fixed_fields(laptop())
