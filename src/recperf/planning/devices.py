"""Devices and networks for plans (published figures, measured ones, JSON files of the user), and seconds of collective
calls from bytes, links and the shape of the cluster.

Ranks on one node use the links of the device, ranks on different nodes use the network; both carry data at the same
time. An all-to-all sends to one node after the other, so latencies add up over nodes. An all-reduce first sums inside
each node, then between nodes, each rank its share, as trees do: latencies grow with the logarithm.

Shapes: R ranks.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..config import from_json, require, within
from ..errors import ConfigError, UsageError, did_you_mean
from ..jsonfile import read

T = TypeVar("T")
GB, TERA = 10**9, 10**12
PRECISIONS = ("float32", "tf32", "bfloat16")
NEAREST = "h200"
"""The device whose attention rates are carried over to devices on which none were measured."""
GEMM_SHARE, COPY_SHARE = 795 / 989, 4.25 / 4.8
"""Shares of the peaks that torch's bfloat16 product and a device copy reach on one H200, measured."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of what a device's libraries and copies reach that the kernels of a step reach."""

    products: float = 0.85
    """Share of the GEMM rate in matrix products at the model's shapes."""
    bytes: float = 0.58
    """Share of the copy bandwidth in element-wise passes, gathers and updates."""
    link: float = 0.75
    """Share of the link bandwidth in collective calls."""
    origin: str = "fitted to two of recperf's steps on one H200 (benchmarks/results/dlrm_v4_step.jsonl); links assumed"
    """Where the shares come from."""

    def __post_init__(self) -> None:
        for name in ("products", "bytes", "link"):
            value = getattr(self, name)
            require(0 < value <= 1, f"efficiency.{name}", value, "above 0, at most 1")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """FLOP/s of an attention kernel on a device by length of rows: a rate of the kernel, not a share of the peak."""

    lengths: tuple[int, ...]
    """Tokens of a row, ascending."""
    forward: tuple[float, ...]
    """FLOP/s of the forward pass for each length; half of each row's square counts."""
    backward: tuple[float, ...]
    """FLOP/s of the backward pass for each length."""
    precision: str = "bfloat16"
    """Precision of these products; in another one the rate changes as that of matrix products does."""
    origin: str = "stated in the file"
    """Source of the figures."""

    def __post_init__(self) -> None:
        require(self.precision in PRECISIONS, "attention.precision", self.precision, ", ".join(PRECISIONS))
        for length in self.lengths:
            within(1, length, 1 << 40, "attention.lengths")
        known = len(self.lengths)
        require(
            known > 0 and list(self.lengths) == sorted({*self.lengths}), "attention.lengths", self.lengths, "ascending"
        )
        for name in ("forward", "backward"):
            rates = getattr(self, name)
            require(len(rates) == known, f"attention.{name}", rates, f"one rate for each of {known} lengths")
            for rate in rates:
                within(1e3, rate, 1e18, f"attention.{name}")

    def rate(self, length: float, *, backward: bool) -> float:
        """FLOP/s for rows of a length, between two known ones on a line over the logarithm of the length."""
        rates = self.backward if backward else self.forward
        return float(np.interp(np.log(max(1.0, length)), np.log(self.lengths), rates))


@dataclass(frozen=True, kw_only=True)
class KnownRates:
    """Peak FLOP/s of dense matrix products by precision; one without a figure is computed in float32."""

    float32: float
    """FLOP/s in float32."""
    tf32: float | None = None
    """FLOP/s in TF32."""
    bfloat16: float | None = None
    """FLOP/s in bfloat16, without sparsity."""

    def __post_init__(self) -> None:
        for name in PRECISIONS:
            if getattr(self, name) is not None:
                within(1e6, getattr(self, name), 1e18, f"device.flops.{name}")

    def of(self, precision: str) -> float:
        return float(getattr(self, precision, None) or self.float32)

    def has(self, precision: str) -> bool:
        return getattr(self, precision, None) is not None

    def divided(self, divisor: float) -> KnownRates:
        return KnownRates(**{name: value and value / divisor for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    """Name in plans."""
    memory_bytes: int
    """Memory of one device."""
    bytes_per_s: float
    """Bandwidth of that memory, reads plus writes."""
    flops: KnownRates
    """Peak FLOP/s by precision."""
    gemm: KnownRates | None = None
    """FLOP/s that the vendor's matrix products reach. Default: the share of the peak that they reach on an H200."""
    copy_bytes_per_s: float | None = None
    """Bandwidth that a copy reaches, reads plus writes. Default: the share of the peak that it reaches on an H200."""
    attention: Attention | None = None
    """FLOP/s of the attention kernel. Default: those on an H200, less where products are slower than there."""
    call_s: float = 25e-6
    """Seconds in which the host calls an operator, which on a GPU launches a kernel."""
    kernel_s: float = 3.2e-6
    """Seconds that a kernel of a CUDA graph takes besides its work, until one that waits for it begins."""
    threads: int = 132 * 2048
    """Threads that it holds at once: small steps, compared with these, are replayed as a CUDA graph."""
    link_bytes_per_s: float
    """Bandwidth to the other devices of a node, one direction, all links together."""
    host_bytes_per_s: float = 50 * GB
    """Bandwidth from host memory, one direction."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """Shares of these rates that the kernels of a step reach."""
    late: float = 0.0
    """Share of their own time for which two ranks with equal work wait for the later one, where that was measured."""
    calibrated: bool = False
    """Products, attention and copies of recperf were timed on this device."""
    origin: str = "stated in the file"
    """Source of the figures."""

    def __post_init__(self) -> None:
        require(bool(self.name), "device.name", self.name, "a name")
        within(1 << 20, self.memory_bytes, 1 << 50, "device.memory_bytes")
        for name in ("bytes_per_s", "link_bytes_per_s", "host_bytes_per_s"):
            within(1e6, getattr(self, name), 1e16, f"device.{name}")
        if self.copy_bytes_per_s is not None:
            within(1e6, self.copy_bytes_per_s, 1e16, "device.copy_bytes_per_s")
        for name in ("call_s", "kernel_s"):
            within(0.0, getattr(self, name), 60.0, f"device.{name}")
        within(1, self.threads, 1 << 32, "device.threads")
        within(0.0, self.late, 10.0, "device.late")

    def product_rate(self, precision: str) -> float:
        """FLOP/s of the matrix products of a step."""
        return self.efficiency.products * self.gemm_rates.of(precision)

    def pass_rate(self) -> float:
        """Bytes per second of the element-wise passes of a step."""
        return self.efficiency.bytes * (self.copy_bytes_per_s or COPY_SHARE * self.bytes_per_s)

    def attention_rate(self, precision: str, length: float, *, backward: bool) -> float:
        """FLOP/s of attention over rows of this length."""
        gemm = self.gemm_rates
        own, there = self.attention, gemm
        if own is None:
            nearest = KNOWN[NEAREST]
            assert nearest.attention is not None
            own, there = nearest.attention, nearest.gemm_rates
        ratio = gemm.of(precision) / there.of(own.precision)
        # A kernel written for one device is not faster on the next one than it was: only slower devices scale.
        return min(1.0, ratio) * own.rate(length, backward=backward)

    @property
    def gemm_rates(self) -> KnownRates:
        return self.gemm or self.flops.divided(1 / GEMM_SHARE)


@dataclass(frozen=True, kw_only=True)
class Store:
    """Rows of tables in host memory or in files."""

    name: str
    """Name in plans."""
    limit: str
    """What is busy when rows are read and written."""
    reads_per_s: float = 1e12
    """Rows that can be read."""
    read_bytes_per_s: float = 1e16
    """Bytes of rows that can be read."""
    write_bytes_per_s: float
    """Bytes of rows that can be written."""
    origin: str
    """Source of the figures."""


FILE = tomllib.loads(files(__package__).joinpath("devices.toml").read_text(encoding="utf-8"))
KNOWN = {name: from_json(Device, {"name": name, **fields}, field="device") for name, fields in FILE["device"].items()}
STORES = {name: from_json(Store, {"name": name, **fields}, field="store") for name, fields in FILE["store"].items()}


def device_of(name: str) -> Device:
    """A known device, or the one that a JSON file describes."""
    return KNOWN[name] if name in KNOWN else read_file(Device, name, set(KNOWN), "device")


def read_file(kind: type[T], name: str, known: set[str], what: str) -> T:
    """The device or network that a JSON file describes; `name` is none of the known ones."""
    if not name.endswith(".json"):
        raise UsageError(
            f"unknown {what} {name!r}{did_you_mean(name, known)}",
            fix=f"{', '.join(sorted(known))}, or a JSON file with fields such as memory_bytes, bytes_per_s and flops",
        )
    path = Path(name).expanduser()
    value = read(path, named=True)
    try:
        return from_json(kind, value, field=what)
    except ConfigError as error:
        raise ConfigError(error.what, where={"file": path, **error.where}, fix=error.fix) from None


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between nodes, for each rank; inside a node the links of the device are used."""

    name: str = "ib400"
    """Name in plans."""
    bytes_per_s: float = 50 * GB
    """Bandwidth of one rank to other nodes, one direction."""
    latency_s: float = 10e-6
    """Latency of a message to another node."""
    link_latency_s: float = 5e-6
    """Latency of a message inside a node."""
    ranks_per_node: int = 8
    """Ranks on a node."""
    origin: str = "stated in the file"
    """Source of the figures."""

    def __post_init__(self) -> None:
        within(1e3, self.bytes_per_s, 1e16, "network.bytes_per_s")
        for name in ("latency_s", "link_latency_s"):
            within(0.0, getattr(self, name), 60.0, f"network.{name}")
        within(1, self.ranks_per_node, 1 << 16, "network.ranks_per_node")


NETWORKS = {
    name: from_json(Network, {"name": name, **fields}, field="network") for name, fields in FILE["network"].items()
}


def network_of(name: str) -> Network:
    """A known network, or the one that a JSON file describes."""
    return NETWORKS[name] if name in NETWORKS else read_file(Network, name, set(NETWORKS), "network")


def node_count(ranks: int, network: Network) -> int:
    return -(-ranks // network.ranks_per_node)


def fullest_and_emptiest(ranks: int, network: Network) -> tuple[int, int]:
    """Ranks on the fullest node and on the last one, which has what the full ones leave."""
    full = min(ranks, network.ranks_per_node)
    return full, ranks - (node_count(ranks, network) - 1) * full


def all_to_all(sent_R: NDArray[np.float64], received_R: NDArray[np.float64], device: Device, network: Network) -> float:
    """Time until the rank that sends or receives most is done; each rank's bytes go to all ranks in equal parts."""
    ranks = len(sent_R)
    most = float(np.maximum(sent_R, received_R).max())
    full, last = fullest_and_emptiest(ranks, network)
    inside = most * (full - 1) / ranks / (device.link_bytes_per_s * device.efficiency.link)
    outside = most * (ranks - last) / ranks / (network.bytes_per_s * device.efficiency.link)
    latency = (network.link_latency_s if full > 1 else 0.0) + (node_count(ranks, network) - 1) * network.latency_s
    return max(inside, outside) + latency


def all_reduce(bytes_: float, ranks: int, device: Device, network: Network) -> float:
    """Time to sum that many bytes, which every rank has. The ranks of the emptiest node have the largest shares."""
    (full, last), nodes = fullest_and_emptiest(ranks, network), node_count(ranks, network)
    share = device.efficiency.link
    inside = 2 * (full - 1) / full * bytes_ / (device.link_bytes_per_s * share)
    outside = 2 * (nodes - 1) / nodes * bytes_ / last / (network.bytes_per_s * share)
    inside_latency = 2 * math.ceil(math.log2(full)) * network.link_latency_s
    return inside + outside + inside_latency + 2 * math.ceil(math.log2(nodes)) * network.latency_s
