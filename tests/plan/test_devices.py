"""Devices and networks, known and from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recperf.errors import ConfigError
from recperf.plan.devices import device_of

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
