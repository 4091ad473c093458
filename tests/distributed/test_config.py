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


def test_overrides_are_read() -> None:
    config = DistributedConfig(sharding="item_id=row, uid=data-parallel", placement="uid=cached-host")
    assert config.shardings == {"item_id": "row", "uid": "data-parallel"}
    assert config.kind == "auto"
    assert config.placements == {"uid": "cached-host"}
    both = DistributedConfig(sharding="table, album_id=column")
    assert (both.kind, both.shardings) == ("table", {"album_id": "column"})
    assert (DistributedConfig(sharding="row").kind, DistributedConfig(sharding="row").shardings) == ("row", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [("item_id=diagonal", "data-parallel"), ("item_id", "table=value"), ("=row", "table=value"),
     ("uid=row,uid=table", "listed twice"), ("uid=table-row", "row, column, table"), ("uid=row,table", "list it first"),
     ("row,table", "list it first")],
)  # fmt: skip
def test_an_unknown_sharding_names_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(sharding=text)


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(ConfigError, match="cached-host"):
        DistributedConfig(placement="uid=disk")


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp32, fp16, bf16"):
        DistributedConfig(all_to_all="fp8")  # type: ignore[arg-type]


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


def test_all_hosts_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda: 4)
    monkeypatch.setattr(Ranks, "maximum", lambda self, value: 1)
    overlap, why = Ranks().overlaps(DistributedConfig(), threads=1)
    assert (overlap, why) == (False, "off: the ranks of this host use 1 of 4 cores, those of another host use all")


def test_an_unknown_overlap_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto, on, off"):
        DistributedConfig(overlap="maybe")  # type: ignore[arg-type]


def test_a_resumed_run_may_be_sharded_differently() -> None:
    other = replace(
        laptop(),
        distributed=DistributedConfig(sharding="uid=row", timeout_s=9, pipeline=False, overlap="off", balance=False),
    )
    assert fixed_fields(other) == fixed_fields(laptop())
    # The precision of messages changes results.
    half = replace(laptop(), distributed=DistributedConfig(all_to_all="fp16"))
    assert fixed_fields(half) != fixed_fields(laptop())
