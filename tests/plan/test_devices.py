"""Devices and networks, known and from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recperf.errors import ConfigError
from recperf.plan.devices import CALL_FACTOR, KNOWN, Rates, device_of, from_peaks

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


def test_ranks_share_the_cores_of_a_cpu() -> None:
    """Rates are those of one core; calls take longer in a step than in a loop."""
    calls = {"elementwise_grad": {"p50": 4e3}, "node": {"p50": 8e3}}
    core = {"copy": {"p50": 20e9}, "gemm": {"float32": {"p50": 30e9}}}
    both = {"copy": {"p50": 40e9}, "gemm": {"float32": {"p50": 60e9}}}
    device = replace(from_peaks({**both, "calls": calls, "other_threads": {"1": core}}), cores=2)
    two, four = device.share(2), device.share(4)
    assert two.product_rate("float32") == 0.85 * 30e9
    assert four.product_rate("float32") == pytest.approx(0.85 * 15e9)
    assert four.memory_bytes == device.memory_bytes // 4
    assert four.call_s == pytest.approx(2 * CALL_FACTOR * 6e-6)
    assert KNOWN["b200"].share(4) is KNOWN["b200"]


def test_a_precision_without_a_figure_is_float32() -> None:
    assert KNOWN["mi350x"].flops.of("tf32") == KNOWN["mi350x"].flops.float32
    assert Rates(float32=2e12, bfloat16=8e12).divided(2) == Rates(float32=1e12, bfloat16=4e12)


def test_ranks_take_a_core_each_and_beyond_that_share_them() -> None:
    core = replace(KNOWN["h200"], name="core", shared=True, cores=2)
    assert [core.ranks_per_core(ranks) for ranks in (1, 2, 4)] == [1.0, 1.0, 2.0]
    two, four = core.share(2), core.share(4)
    assert (two.bytes_per_s, two.flops) == (core.bytes_per_s, core.flops)
    assert (four.bytes_per_s, four.link_bytes_per_s) == (core.bytes_per_s / 2, core.link_bytes_per_s / 2)
    assert (two.memory_bytes, four.memory_bytes) == (core.memory_bytes // 2, core.memory_bytes // 4)
    with pytest.raises(ConfigError, match="unless ranks share the device"):
        replace(core, shared=False)
    with pytest.raises(ConfigError, match=r"device\.cores"):
        replace(core, cores=0)
