"""Devices for plans: published figures, measured ones, and JSON files of the user."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..config import from_json, require, within
from ..errors import ConfigError, UsageError, did_you_mean
from ..jsonfile import read
from ..measure.peaks.records import Peaks

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

    def times(self, factor: float) -> Attention:
        forward, backward = (tuple(factor * rate for rate in rates) for rates in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)


@dataclass(frozen=True, kw_only=True)
class Rates:
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

    def divided(self, ranks: float) -> Rates:
        """The rates of each rank where that many share a device."""
        return Rates(**{name: value and value / ranks for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    """Name in plans."""
    memory_bytes: int
    """Memory of one device; for a CPU, of the whole host."""
    bytes_per_s: float
    """Bandwidth of that memory, reads plus writes."""
    flops: Rates
    """Peak FLOP/s by precision."""
    gemm: Rates | None = None
    """FLOP/s that the vendor's matrix products reach. Default: the share of the peak that they reach on an H200."""
    copy_bytes_per_s: float | None = None
    """Bandwidth that a copy reaches, reads plus writes. Default: the share of the peak that it reaches on an H200."""
    attention: Attention | None = None
    """FLOP/s of the attention kernel. Default: those on an H200, less where products are slower than there."""
    call_s: float = 25e-6
    """Seconds in which the host calls an operator, which on a GPU launches a kernel."""
    kernel_s: float = 2.7e-6
    """Seconds from one small kernel of a CUDA graph to the next."""
    threads: int = 132 * 2048
    """Threads that it holds at once: small steps, compared with these, are replayed as a CUDA graph."""
    link_bytes_per_s: float
    """Bandwidth to the other devices of a node, one direction, all links together."""
    host_bytes_per_s: float = 50 * GB
    """Bandwidth from host memory, one direction."""
    shared: bool = False
    """All ranks of a node share one device, as gloo ranks on one host do: each gets a share of rates and memory."""
    cores: int | None = None
    """Cores of a shared device whose rates are those of one core; more ranks than cores share them."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """Shares of these rates that the kernels of a step reach."""
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
        if self.cores is not None:
            require(self.shared, "device.cores", self.cores, "nothing, unless ranks share the device")
            within(1, self.cores, 1 << 16, "device.cores")

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
    def gemm_rates(self) -> Rates:
        return self.gemm or self.flops.divided(1 / GEMM_SHARE)

    def ranks_per_core(self, on_node: int) -> float:
        """How many ranks share the rates that one rank alone would have."""
        return max(1.0, on_node / (self.cores or 1)) if self.shared else 1.0

    def share(self, on_node: int) -> Device:
        """The part of the device that one of that many ranks on a node has."""
        if not self.shared or on_node == 1:
            return self
        sharers = self.ranks_per_core(on_node)
        return replace(
            self,
            memory_bytes=self.memory_bytes // on_node,
            bytes_per_s=self.bytes_per_s / sharers,
            flops=self.flops.divided(sharers),
            gemm=self.gemm and self.gemm.divided(sharers),
            copy_bytes_per_s=self.copy_bytes_per_s and self.copy_bytes_per_s / sharers,
            attention=self.attention and self.attention.times(1 / sharers),
            link_bytes_per_s=self.link_bytes_per_s / sharers,
            host_bytes_per_s=self.host_bytes_per_s / sharers,
            call_s=self.call_s * sharers,
        )


CALL_FACTOR = 2.8
"""Time of a call in a step over that of a call in a loop: Python, autograd and cold caches around it. From steps of
micro-dlrm and dlrm-v4 with 4 samples on one ARM core, divided by their calls: 2.75 and 2.9."""


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


def from_peaks(peaks: Peaks) -> Device:
    """This machine's CPU as a device whose cores the ranks of the host take one by one, from its measured ceilings."""
    from ..machine import available_bytes, usable_cores

    core = peaks.other_threads.get("1", peaks)
    copy, gemm = core.copy.p50, core.gemm["float32"].p50
    # Gates are sigmoids and norms have roots: a number takes as long as a special function, and is read and written.
    passes = 8 * core.special.p50 / copy if core.special else 0.1
    call_ns = [peaks.calls[kind].p50 for kind in ("elementwise_grad", "node") if kind in peaks.calls] or [5e3]
    return Device(
        name="cpu",
        memory_bytes=available_bytes(),
        bytes_per_s=copy,
        flops=Rates(float32=gemm),
        gemm=Rates(float32=gemm),
        copy_bytes_per_s=copy,
        attention=Attention(
            lengths=(1,), forward=(0.38 * gemm,), backward=(0.38 * gemm,), origin="assumed: 0.38 of matrix products"
        ),
        call_s=CALL_FACTOR * 1e-9 * sum(call_ns) / len(call_ns),
        # A message between processes of one host is copied in and copied out.
        link_bytes_per_s=copy / 4,
        host_bytes_per_s=copy,
        shared=True,
        cores=usable_cores(),
        efficiency=Efficiency(
            products=0.85,
            bytes=min(1.0, passes),
            link=0.5,
            origin="as many numbers as special functions (recperf peaks)" if core.special else "assumed",
        ),
        origin="one core, measured here (recperf peaks)",
    )


def device_of(name: str) -> Device:
    """A known device, or the one that a JSON file describes."""
    return KNOWN[name] if name in KNOWN else read_file(Device, name, {*KNOWN, "cpu"}, "device")


def read_file(kind: type[T], name: str, known: set[str], what: str) -> T:
    """The device or network that a JSON file describes; `name` is none of the known ones."""
    if not name.endswith(".json"):
        raise UsageError(
            f"unknown {what} {name!r}{did_you_mean(name, known)}",
            fix=f"{', '.join(sorted(known))}, or a JSON file; docs/planning.md has its fields",
        )
    path = Path(name).expanduser()
    value = read(path, named=True)
    try:
        return from_json(kind, value, field=what)
    except ConfigError as error:
        raise ConfigError(error.what, where={"file": path, **error.where}, fix=error.fix) from None
