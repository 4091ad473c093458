"""Devices and networks, known and from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_plan import PLAIN, WIRES

from recperf.errors import ConfigError, UsageError
from recperf.planning.devices import (
    KNOWN,
    STORES,
    Attention,
    Efficiency,
    KnownRates,
    all_reduce,
    all_to_all,
    device_of,
    fullest_and_emptiest,
    network_of,
    node_count,
)

FILE: dict[str, Any] = {
    "name": "card",
    "memory_bytes": 80 * 10**9,
    "bytes_per_s": 2e12,
    "flops": {"bfloat16": 312e12, "float32": 19.5e12},
    "link_bytes_per_s": 300e9,
    "efficiency": {"products": 0.5},
}


def write(folder: Path, value: object) -> str:
    path = folder / "device.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_a_file_describes_a_device(tmp_path: Path) -> None:
    device = device_of(write(tmp_path, FILE))
    assert (device.name, device.memory_bytes, device.flops.of("bfloat16")) == ("card", 80 * 10**9, 312e12)
    assert device.efficiency.products == 0.5
    assert device.origin == "stated in the file"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory": 1}, "unknown config field 'device.memory'"),
        ({"flops": {"fp32": 1e12}}, "device.flops"),
        ({"flops": {}}, "lacks float32"),
        ({"memory_bytes": -1}, "device.memory_bytes"),
        ({"bytes_per_s": "fast"}, "device.bytes_per_s"),
        ({"flops": {"float32": -1.0}}, "device.flops.float32"),
        ({"efficiency": {"products": 1.5}}, "efficiency.products"),
        ({"copy_bytes_per_s": -1.0}, "device.copy_bytes_per_s"),
        ({"call_s": -1e-6}, "device.call_s"),
        (
            {"attention": {"lengths": [64], "forward": [1e12], "backward": [1e12], "precision": "of"}},
            "attention.precision",
        ),
        ({"attention": {"lengths": [64, 32], "forward": [1e12] * 2, "backward": [1e12] * 2}}, "ascending"),
        ({"attention": {"lengths": [64], "forward": [], "backward": [1e12]}}, "one rate for each of 1 lengths"),
    ],
)
def test_a_bad_value_is_named_with_its_file(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = write(tmp_path, FILE | change)
    with pytest.raises(ConfigError) as caught:
        device_of(path)
    assert says in caught.value.what
    assert caught.value.where["file"] == path


def test_the_documented_shares_and_rates_apply_where_a_file_names_none(tmp_path: Path) -> None:
    """docs/planning.md: 0.85 of the GEMM rate, 0.58 of the copy bandwidth, 0.75 of a link, 25 and 3.2 µs a call."""
    device = device_of(write(tmp_path, {name: value for name, value in FILE.items() if name != "efficiency"}))
    assert device.product_rate("float32") == pytest.approx(0.85 * 795 / 989 * 19.5e12, rel=1e-12)
    assert device.product_rate("bfloat16") == pytest.approx(0.85 * 795 / 989 * 312e12, rel=1e-12)
    assert device.product_rate("tf32") == device.product_rate("float32"), "computed in float32 where it is not known"
    assert device.pass_rate() == pytest.approx(0.58 * 4.25 / 4.8 * 2e12, rel=1e-12)
    assert device.efficiency.link == 0.75
    assert (device.call_s, device.kernel_s, device.threads, device.host_bytes_per_s) == (25e-6, 3.2e-6, 270_336, 50e9)
    assert (device.late, device.calibrated) == (0.0, False)
    network = network_of(write(tmp_path, {}))
    assert (network.bytes_per_s, network.latency_s, network.link_latency_s) == (50e9, 10e-6, 5e-6)
    assert (network.ranks_per_node, network_of("ib800").bytes_per_s, KNOWN["h100"].host_bytes_per_s) == (8, 100e9, 50e9)
    host, file = STORES["host"], STORES["file"]
    assert (host.reads_per_s, host.read_bytes_per_s) == (1e12, 37.6e9)
    assert (file.reads_per_s, file.read_bytes_per_s) == (74_000, 1e16)


def test_stated_rates_replace_shares_of_the_peak() -> None:
    plain = replace(
        PLAIN,
        gemm=KnownRates(float32=4e12, bfloat16=8e12),
        copy_bytes_per_s=3e12,
        efficiency=Efficiency(products=0.5, bytes=0.25),
    )
    rates = [plain.product_rate(name) for name in ("float32", "bfloat16", "tf32")]
    assert (rates, plain.pass_rate()) == ([2e12, 4e12, 2e12], 0.75e12)
    known = KnownRates(float32=6e12, tf32=3e12)
    assert known.divided(3.0) == KnownRates(float32=2e12, tf32=1e12)
    assert [known.has(name) for name in ("float32", "tf32", "bfloat16")] == [True, True, False]


def test_attention_lies_on_a_line_over_the_logarithm_of_the_length() -> None:
    attention = Attention(lengths=(1, 100), forward=(1e12, 3e12), backward=(2e12, 6e12))
    for length, share in ((0.1, 0.0), (1, 0.0), (1.2, np.log(1.2) / np.log(100)), (10, 0.5), (100, 1.0), (1e6, 1.0)):
        assert attention.rate(length, backward=False) == pytest.approx((1 + 2 * share) * 1e12, rel=1e-12)
        assert attention.rate(length, backward=True) == pytest.approx((2 + 4 * share) * 1e12, rel=1e-12)
    own = replace(
        PLAIN, gemm=KnownRates(float32=4e12, bfloat16=8e12), attention=replace(attention, precision="float32")
    )
    assert own.attention_rate("float32", 10, backward=False) == pytest.approx(2e12)
    assert own.attention_rate("bfloat16", 10, backward=True) == pytest.approx(4e12), "no faster in another precision"
    half = replace(own, attention=attention)
    assert half.attention_rate("float32", 10, backward=False) == pytest.approx(1e12), "half, as its products are"
    # Without figures: those of an H200, whose bfloat16 products reach 795 TFLOP/s; faster products change nothing.
    for products, share in ((79.5e12, 0.1), (795e12, 1.0), (1590e12, 1.0)):
        other = replace(PLAIN, gemm=KnownRates(float32=1e12, bfloat16=products), attention=None)
        assert other.attention_rate("bfloat16", 1024, backward=False) == pytest.approx(share * 452e12)
        assert other.attention_rate("bfloat16", 1024, backward=True) == pytest.approx(share * 390e12)


def test_messages_of_ranks_whose_last_node_is_not_full() -> None:
    """10 ranks on nodes of 4, 4 and 2; half of every bandwidth is reached."""
    half, apart = replace(PLAIN, efficiency=replace(PLAIN.efficiency, link=0.5)), replace(WIRES, ranks_per_node=1)
    assert (node_count(8, WIRES), node_count(9, WIRES), node_count(10, WIRES), node_count(3, apart)) == (2, 3, 3, 3)
    spread = [fullest_and_emptiest(ranks, WIRES) for ranks in (3, 4, 5, 8, 10)]
    assert spread == [(3, 3), (4, 4), (4, 1), (4, 4), (4, 2)]
    sent_R, received_R = np.array([1e9, *9 * [0.0]]), np.full(10, 5e8)
    # 8/10 of a GB leave the last node's ranks at 0.5 GB/s; 3/10 would take 60 ms at 5 GB/s.
    assert all_to_all(sent_R, received_R, half, WIRES) == pytest.approx(1.6 + 1e-4 + 2e-3, rel=1e-12)
    wide = replace(WIRES, bytes_per_s=1e12)
    assert all_to_all(sent_R, received_R, half, wide) == pytest.approx(0.06 + 1e-4 + 2e-3, rel=1e-12)
    assert all_to_all(np.full(2, 1e9), np.zeros(2), half, apart) == pytest.approx(1.0 + 1e-3, rel=1e-12)
    assert all_reduce(1e9, 2, half, apart) == pytest.approx(2 * 0.5 * 2.0 + 2e-3, rel=1e-12)
    inside, outside = 2 * 3 / 4 * 0.2, 2 * 2 / 3 * 2.0 / 2
    assert all_reduce(1e9, 10, half, WIRES) == pytest.approx(inside + outside + 4e-4 + 4e-3, rel=1e-12)
    assert (all_reduce(1e9, 1, half, WIRES), all_to_all(np.ones(1), np.ones(1), half, WIRES)) == (0.0, 0.0)


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    for name, find in (("h2000", device_of), ("ib40", network_of)):
        with pytest.raises(UsageError) as caught:
            find(name)
        assert name in caught.value.what
        assert {"h2000": "h200", "ib40": "ib400"}[name] in caught.value.what
    with pytest.raises(ConfigError, match="a name"):
        replace(PLAIN, name="")
    with pytest.raises(ConfigError, match="ascending"):
        Attention(lengths=(), forward=(), backward=())
