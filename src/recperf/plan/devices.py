"""Devices and networks a plan can be made for: what makers state, what was measured, and files of one's own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import from_json, require, within
from ..errors import ConfigError, UsageError, closest

GB, GIB, TERA = 10**9, 2**30, 10**12


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a device's stated peaks that a step reaches, one set for every device."""

    products: float = 0.408
    """Of the peak FLOP/s, in matrix products."""
    attention: float = 0.374
    """Of the peak FLOP/s, in attention over rows of different lengths."""
    bytes: float = 0.371
    """Of the peak bandwidth, where bytes are what takes the time."""
    link: float = 0.75
    """Of a link's stated bandwidth, in collective calls."""
    origin: str = "recperf's own step on one H200 (benchmarks/results/dlrm_v4_step.jsonl); links assumed"
    """Where the shares come from."""

    def __post_init__(self) -> None:
        for name in ("products", "attention", "bytes", "link"):
            value = getattr(self, name)
            require(0 < value <= 1, f"efficiency.{name}", value, "above 0, at most 1")

    def scaled(self, factor: float, origin: str) -> Efficiency:
        """The device's own three times `factor`; a link is not the device's."""
        within(1e-6, factor, 1e3, "efficiency factor")
        parts = {name: min(1.0, factor * getattr(self, name)) for name in ("products", "attention", "bytes")}
        return replace(self, **parts, origin=origin)


REFERENCE = Efficiency(
    products=0.276,
    attention=0.276,
    origin="the MLPerf reference's three layers on one H200, 273 of 989 TFLOP/s; bytes as recperf's; links assumed",
)
"""Of the reference's kernels: its layers were timed together, so that products and attention share a figure."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Seconds that a step costs on a device whatever its batch: calls of the framework, and what is as large for one
    sample as for many. Nothing unless they were measured; `plan/calibrate.py` does."""

    input: float = 0.0
    """Of making a batch ready, as far as it is waited for."""
    lookup: float = 0.0
    """Of rows looked up."""
    forward: float = 0.0
    """Of the model's layers."""
    backward: float = 0.0
    """Of their gradients."""
    update: float = 0.0
    """Of both updates."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            within(0.0, value, 1e3, f"device.calls.{name}")

    def times(self, factor: float) -> Calls:
        return Calls(**{name: factor * value for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak FLOP/s of dense matrix products; a precision without a figure is computed in float32."""

    float32: float
    """In float32."""
    tf32: float | None = None
    """In TF32."""
    bfloat16: float | None = None
    """In bfloat16, without sparsity."""

    def __post_init__(self) -> None:
        for name in ("float32", "tf32", "bfloat16"):
            if getattr(self, name) is not None:
                within(1e6, getattr(self, name), 1e18, f"device.flops.{name}")

    def of(self, precision: str) -> float:
        return float(getattr(self, precision, None) or self.float32)

    def over(self, ranks: float) -> Rates:
        """What each of so many ranks has, where they share a device."""
        parts = {name: value and value / ranks for name, value in vars(self).items()}
        return Rates(**parts)


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    """What a plan calls it."""
    memory_bytes: int
    """Memory of one device; of a CPU, of the whole host."""
    bytes_per_s: float
    """Bandwidth of that memory, read and written together."""
    flops: Rates
    """Peak FLOP/s by precision."""
    link_bytes_per_s: float
    """To the other devices of a node, one way, all links together."""
    link: str = "link"
    """What those links are called."""
    host_bytes_per_s: float = 50 * GB
    """From the host's memory, one way."""
    shared: bool = False
    """Ranks of a node share one device, as gloo ranks on one host do: each has a share of its rates and memory."""
    cores: int | None = None
    """Of a shared device whose rates are those of one core: a rank works on one, and ranks beyond them share them."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """Which shares of its peaks a step reaches."""
    calls: Calls = field(default_factory=Calls)
    """What a step costs beside its work."""
    origin: str = "stated in the file"
    """Where its figures come from."""

    def __post_init__(self) -> None:
        require(bool(self.name), "device.name", self.name, "a name")
        within(1 << 20, self.memory_bytes, 1 << 50, "device.memory_bytes")
        for name in ("bytes_per_s", "link_bytes_per_s", "host_bytes_per_s"):
            within(1e6, getattr(self, name), 1e16, f"device.{name}")
        if self.cores is not None:
            require(self.shared, "device.cores", self.cores, "nothing, unless ranks share the device")
            within(1, self.cores, 1 << 16, "device.cores")

    def crowd(self, ranks_here: int) -> float:
        """How many ranks share what one rank alone would have."""
        return max(1.0, ranks_here / (self.cores or 1)) if self.shared else 1.0

    def share(self, ranks_here: int) -> Device:
        """What one of so many ranks of a node has of it."""
        if not self.shared or ranks_here == 1:
            return self
        crowd = self.crowd(ranks_here)
        return replace(
            self,
            memory_bytes=self.memory_bytes // ranks_here,
            bytes_per_s=self.bytes_per_s / crowd,
            flops=self.flops.over(crowd),
            link_bytes_per_s=self.link_bytes_per_s / crowd,
            host_bytes_per_s=self.host_bytes_per_s / crowd,
            calls=self.calls.times(crowd),
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """Between nodes, for each rank; inside a node the device's own links count."""

    name: str = "ib400"
    """What a plan calls it."""
    bytes_per_s: float = 50 * GB
    """Of one rank to other nodes, one way."""
    latency_s: float = 10e-6
    """Of one message to another node."""
    link_latency_s: float = 5e-6
    """Of one message inside a node."""
    ranks_per_node: int = 8
    """Devices a node has."""
    origin: str = "stated in the file"
    """Where its figures come from."""

    def crowded(self, crowd: float) -> Network:
        """As so many ranks see it that share what one would have: a message waits until its rank has its turn."""
        return replace(self, latency_s=crowd * self.latency_s, link_latency_s=crowd * self.link_latency_s)

    def __post_init__(self) -> None:
        within(1e3, self.bytes_per_s, 1e16, "network.bytes_per_s")
        for name in ("latency_s", "link_latency_s"):
            within(0.0, getattr(self, name), 60.0, f"network.{name}")
        within(1, self.ranks_per_node, 1 << 16, "network.ranks_per_node")


KNOWN = {
    "h200": Device(
        name="h200",
        memory_bytes=143_771 * 2**20,
        bytes_per_s=4.8e12,
        flops=Rates(bfloat16=989 * TERA, tf32=494 * TERA, float32=67 * TERA),
        link_bytes_per_s=450 * GB,
        link="NVLink 4",
        origin="stated by maker; memory as its driver reports it",
    ),
    "b200": Device(
        name="b200",
        memory_bytes=180 * GB,
        bytes_per_s=8e12,
        flops=Rates(bfloat16=2250 * TERA, tf32=1125 * TERA, float32=75 * TERA),
        link_bytes_per_s=900 * GB,
        link="NVLink 5",
        origin="stated by maker",
    ),
    "mi350x": Device(
        name="mi350x",
        memory_bytes=288 * GIB,
        bytes_per_s=8e12,
        flops=Rates(bfloat16=2300 * TERA, float32=144 * TERA),
        link_bytes_per_s=537 * GB,
        link="Infinity Fabric",
        origin="stated by maker",
    ),
}
"""Peaks without sparsity. A link counts one way: half of what its maker states for both."""

NETWORKS = {
    "ib400": Network(origin="assumed: 400 Gbit/s a rank"),
    "ib200": Network(name="ib200", bytes_per_s=25 * GB, origin="assumed: 200 Gbit/s a rank"),
    "ib800": Network(name="ib800", bytes_per_s=100 * GB, origin="assumed: 800 Gbit/s a rank"),
    "eth25": Network(name="eth25", bytes_per_s=3.1e9, latency_s=50e-6, origin="assumed: 25 Gbit/s a rank"),
    "loopback": Network(
        name="loopback", bytes_per_s=1e9, latency_s=200e-6, link_latency_s=200e-6, ranks_per_node=1 << 16,
        origin="assumed: gloo ranks of one host",
    ),
}  # fmt: skip


def from_peaks(found: dict[str, Any]) -> Device:
    """This machine's CPU as a device all ranks of the host share, from its measured ceilings."""
    from ..machine import available_bytes

    copy = float(found["copy"]["p50"])
    return Device(
        name="cpu",
        memory_bytes=available_bytes(),
        bytes_per_s=copy,
        flops=Rates(float32=float(found["gemm"]["float32"]["p50"])),
        # A message between processes of one host is copied in and copied out.
        link_bytes_per_s=copy / 4,
        link="memory",
        host_bytes_per_s=copy,
        shared=True,
        efficiency=Efficiency(
            products=0.6,
            attention=0.1,
            bytes=0.5,
            link=0.5,
            origin="assumed; a measured step says more: `calibrated`",
        ),
        origin="measured here (recperf peaks)",
    )


def device_of(name: str) -> Device:
    """A known device, or the one a JSON file describes."""
    if name in KNOWN:
        return KNOWN[name]
    found: Device = _read(Device, name, {*KNOWN, "cpu"}, "device")
    return found


def network_of(name: str, *, ranks_per_node: int | None = None) -> Network:
    """A known network, or the one a JSON file describes."""
    found = NETWORKS[name] if name in NETWORKS else _read(Network, name, set(NETWORKS), "network")
    return found if ranks_per_node is None else replace(found, ranks_per_node=ranks_per_node)


def _read(kind: type[Device] | type[Network], name: str, known: set[str], what: str) -> Any:
    if not name.endswith(".json"):
        guess = closest(name, known)
        raise UsageError(
            f"unknown {what} {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
            fix=f"{', '.join(sorted(known))}, or a JSON file; docs/planning.md has its fields",
        )
    path = Path(name).expanduser()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the {what}: {reason}", where={"file": path}) from None
    try:
        return from_json(kind, value, field=what)
    except ConfigError as error:
        raise ConfigError(error.what, where={"file": path, **error.where}, fix=error.fix) from None
