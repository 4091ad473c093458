"""Where tables are placed, by what fits."""

from __future__ import annotations

import pytest

from recperf.errors import ConfigError, MachineError
from recperf.models.tiers.config import TablesConfig, decide

GIB = 1 << 30


@pytest.mark.parametrize(
    ("placement", "needed", "device", "expected"),
    [
        ("auto", 40, "cuda", "device"),
        ("auto", 90, "cuda", "host"),
        ("auto", 559, "cuda", "file"),
        ("host", 40, "cuda", "host"),
        ("auto", 40, "cpu", "device"),
        ("auto", 559, "cpu", "file"),
        ("host", 40, "cpu", "device"),
    ],
)
def test_auto_takes_the_first_that_fits(placement: str, needed: int, device: str, expected: str) -> None:
    config = TablesConfig(placement=placement)
    free = {"device_free": 60 * GIB if device == "cuda" else 120 * GIB, "host_free": 120 * GIB}
    tiers = decide(config, needed * GIB, device=device, **free)
    assert tiers.placement == expected
    assert tiers.why.startswith(expected)
    assert 0 < tiers.cache_bytes <= needed * GIB


def test_the_cache_is_as_large_as_requested() -> None:
    config = TablesConfig(device_bytes="40GiB", resident="2GiB")
    assert decide(config, 90 * GIB, device="cuda", device_free=130 * GIB, host_free=120 * GIB).cache_bytes == 40 * GIB
    assert decide(config, 90 * GIB, device="cpu", device_free=9 * GIB, host_free=9 * GIB).cache_bytes == 2 * GIB
    with pytest.raises(ConfigError, match=r"tables\.resident is 'much'"):
        TablesConfig(resident="much")


def test_a_cache_larger_than_the_free_memory_of_the_card_is_refused() -> None:
    free = {"device": "cuda", "device_free": 60 * GIB, "host_free": 120 * GIB}
    for placement in ("auto", "host", "file"):
        with pytest.raises(MachineError, match=r"device_bytes is 70 GiB, 60 GiB of the GPU are free"):
            decide(TablesConfig(placement=placement, device_bytes="70GiB"), 90 * GIB, **free)
    # The rest of a step is only estimated.
    assert decide(TablesConfig(device_bytes="50GiB"), 90 * GIB, **free, others=20 * GIB).cache_bytes == 50 * GIB
    # What does not fit into 9 tenths of the card lies elsewhere, however large the cache may be.
    assert decide(TablesConfig(device_bytes="70GiB"), 58 * GIB, **free).placement == "host"
