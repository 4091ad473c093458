"""The options of several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recperf.distributed.config import DistributedConfig
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


def test_a_resumed_run_may_be_sharded_differently() -> None:
    other = replace(laptop(), distributed=DistributedConfig(sharding="uid=row", timeout_s=9, pipeline=False))
    assert fixed_fields(other) == fixed_fields(laptop())
    # The precision of messages changes results.
    half = replace(laptop(), distributed=DistributedConfig(all_to_all="fp16"))
    assert fixed_fields(half) != fixed_fields(laptop())
