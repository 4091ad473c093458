"""Rates of this machine for plans: products and attention at the model's shapes, copies, the host's calls, and messages
between two ranks.

Stored by host, so that later plans of the same model and device use them without torch; measuring needs torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from .. import locations
from ..errors import MachineError, RecperfError
from ..files import make_folder, write_json
from ..jsonfile import Struct, read_sealed, sealed
from ..machine import fingerprint, host_facts
from . import link as links
from .devices import KNOWN, Attention, Device, KnownRates, Network
from .link import SMALL_DLRM, Link, eager_step
from .work import CALLS, CALLS_PER_LAYER, Work

if TYPE_CHECKING:
    import torch

FORM = ("recperf calibration", 3)
MOST_ROWS, MOST_SEQUENCES = 1 << 18, 128
"""Rows of the product and rows of attention on a GPU: enough to fill it."""
SCALES = (0.25, 1.0, 1.5)
"""Lengths of rows at which attention is timed, over those of the model: `--history` plans shorter and longer ones."""
SAME_MEMORY = 0.05
"""A GPU whose memory differs from that of the known one by a larger share is another one."""
COPIED = 2 << 30
"""Bytes of the buffer that is copied."""
CALL_STEPS, CALL_READINGS = 50, 5
"""Steps of a reading of how fast operators are called, and readings after a first one that warms up."""
DEVICE = "cuda"
Say = Callable[[str], None]
Timer = Callable[[Callable[[], object]], float]
"""Nanoseconds of a call."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured on a device for one model."""

    device: str
    """Name of the device in plans."""
    product: float
    """FLOP/s of the model's largest product, forward and backward."""
    copy: float
    """Bytes per second of a copy, reads plus writes."""
    memory_bytes: int
    attention: Attention | None = None
    call_s: float | None = None
    """Seconds in which the host calls an operator of a step; None in calibrations of earlier versions."""
    link: Link | None = None
    """Messages between two ranks of this host; None where it has one GPU."""
    measured: str = ""

    def applied(self, device: Device, precision: str) -> Device:
        """The device with these rates instead of assumed ones, and a GPU with the memory that it has."""
        share, link = device.efficiency, self.link
        names = "products, attention, copies, calls" + (f" and {link.backend} messages" if link else "")
        if link:
            device = replace(device, link_bytes_per_s=link.bytes_per_s / share.link, late=link.late)
        return replace(
            device,
            memory_bytes=self.memory_bytes,
            gemm=replace(
                device.gemm_rates, **{precision if device.gemm_rates.has(precision) else "float32": self.product}
            ),
            copy_bytes_per_s=self.copy,
            attention=self.attention or device.attention,
            call_s=self.call_s or device.call_s,
            efficiency=replace(
                share,
                products=1.0,
                origin=f"{names} measured here at {self.measured}; passes: {share.origin}",
            ),
            calibrated=True,
            origin=f"{device.origin}; calibrated here",
        )

    def connected(self, network: Network) -> Network:
        """The network with the measured latency inside a node."""
        return replace(network, link_latency_s=self.link.latency_s) if self.link else network


class _Stored(Struct):
    format: str
    version: int
    entry: Calibration


def stored(device: str, work: Work) -> Calibration | None:
    """What an earlier call measured here for this model, and no torch is needed to read."""
    try:
        return read_sealed(_path(device, work), FORM, _Stored, fix="recperf plan measures again").entry
    except RecperfError:
        # Not measured, or damaged: it is measured again.
        return None


def measure(work: Work, batch: int, say: Say) -> Calibration:
    """Measure the GPU at hand, and messages where there are two, and store it."""
    import torch

    if not torch.cuda.is_available():
        raise MachineError("--calibrate measures a GPU, and this machine has none", fix="leave --calibrate out")
    several = torch.cuda.device_count() > 1
    messages = "messages between two" if several else "no messages: this host has one GPU"
    say(f"calibrating {torch.cuda.get_device_name()}: product, attention, copy, operator calls; {messages}")
    rates = _of_gpu(work, batch)
    if several:
        rates = replace(rates, link=links.measure(DEVICE))
    _store(rates, work, say)
    return rates


def card_name(name: str, memory_bytes: int) -> str:
    """The name in plans of a GPU that its driver calls `name`: that of the known one which it is, else its own."""
    known = _similar(name)
    if known is None or abs(memory_bytes / known.memory_bytes - 1) > SAME_MEMORY:
        return name
    return known.name


def _similar(name: str) -> Device | None:
    """The known device whose name is part of this one."""
    parts = re.split(r"[\s-]", name.lower())
    return next((device for known, device in KNOWN.items() if known in parts), None)


def measured_device(calibration: Calibration) -> Device:
    """The device in plans of a GPU that was measured: a known one, one that differs from it in its memory, or one
    described by what was measured."""
    similar = _similar(calibration.device)
    if similar is not None:
        return replace(similar, name=calibration.device, memory_bytes=calibration.memory_bytes)
    return Device(
        name=calibration.device,
        memory_bytes=calibration.memory_bytes,
        bytes_per_s=calibration.copy,
        flops=KnownRates(float32=calibration.product),
        link_bytes_per_s=32e9,
        origin="measured; links assumed",
    )


def _path(device: str, work: Work) -> Path:
    """The file of this host, device and model."""
    planned = f"{device}, {work.precision}, {work.shapes}, {work.attention_length:.0f} tokens"
    return locations.home() / "calibrations" / f"{fingerprint(host_facts() | {'planned': planned})}.json"


def _store(calibration: Calibration, work: Work, say: Say) -> None:
    path = _path(calibration.device, work)
    try:
        make_folder(path.parent)
        write_json(path, sealed(_Stored(*FORM, entry=calibration)))
    except MachineError as error:
        say(f"the calibration is not stored: {error.what}")


def _of_gpu(work: Work, batch: int) -> Calibration:
    import torch

    from ..measure.peaks.gpu import Gpu
    from ..measure.peaks.sampling import QUICK, Sampler

    sampler = Sampler(QUICK)
    gpu = Gpu(sampler, lambda _: None, lambda _: None)
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    name = card_name(torch.cuda.get_device_name(), memory)

    def ns_of(once: Callable[[], object]) -> float:
        return median(sampler.readings(gpu.timed(once)))

    return _rates(work, min(batch, MOST_SEQUENCES), ns_of, name=name, memory=memory)


def _rates(work: Work, batch: int, ns_of: Timer, *, name: str, memory: int) -> Calibration:
    """FLOP/s of the product and of both passes of attention by length, and bytes per second of a copy."""
    import torch

    shapes = work.shapes
    dtype = torch.bfloat16 if work.precision == "bfloat16" else torch.float32
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if work.precision == "tf32" else "highest")
    try:
        rows = min(MOST_ROWS, max(1, round(shapes.rows_per_sample * batch)))
        x, weight, grad = (
            torch.randn(*size, device=DEVICE).to(dtype)
            for size in ((rows, shapes.inputs), (shapes.inputs, shapes.outputs), (rows, shapes.outputs))
        )

        def products() -> None:
            torch.mm(x, weight)
            torch.mm(grad, weight.t())
            torch.mm(x.t(), grad)

        product = 6e9 * rows * shapes.inputs * shapes.outputs / ns_of(products)
    finally:
        torch.set_float32_matmul_precision(before)
    # Very short rows have the same length at two scales.
    scales = {max(1, round(scale * work.attention_length)): scale for scale in SCALES if shapes.heads}
    rates = [(length, *_attention_rates(work, scale, batch, dtype, ns_of)) for length, scale in scales.items()]
    attention = None
    if rates:
        lengths, forward, backward = zip(*rates)
        attention = Attention(
            lengths=lengths, forward=forward, backward=backward, precision=work.precision, origin="measured here"
        )
    buffer = torch.ones(COPIED // 4, device=DEVICE)
    half = buffer.numel() // 2
    return Calibration(
        device=name,
        product=product,
        copy=2e9 * 4 * half / ns_of(lambda: buffer[:half].copy_(buffer[half : 2 * half])),
        memory_bytes=memory,
        attention=attention,
        call_s=call_seconds(),
        measured=datetime.now(UTC).isoformat(timespec="minutes"),
    )


def call_seconds() -> float:
    """Seconds in which this host calls an operator: an eager step of a DLRM whose kernels take less time than their
    calls, over the operators that plans count in it."""
    import torch

    step = eager_step(DEVICE)
    readings = []
    for _ in range(1 + CALL_READINGS):
        began = perf_counter()
        for _ in range(CALL_STEPS):
            step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        readings.append((perf_counter() - began) / CALL_STEPS)
    layers = len(SMALL_DLRM.bottom) + len(SMALL_DLRM.top_widths) - 2
    return median(readings[1:]) / (CALLS + CALLS_PER_LAYER * layers)


def _attention_rates(work: Work, scale: float, batch: int, dtype: torch.dtype, ns_of: Timer) -> tuple[float, float]:
    """FLOP/s of both passes over rows `scale` times as long as the model's."""
    import torch

    from ..ops import hstu_attention

    shapes = work.shapes
    # In any order, as rows of a batch are: which rows come last decides how long some cores have nothing to do.
    place_B = np.random.default_rng(0).permutation(
        ((np.arange(batch) + 0.5) / batch * len(work.lengths)).astype(np.int64)
    )
    length_B = np.maximum(1, np.round(scale * np.asarray(work.lengths)[place_B])).astype(np.int64)
    tokens, longest = int(length_B.sum()), int(length_B.max())
    offsets_B1 = torch.from_numpy(np.concatenate([[0], length_B.cumsum()])).to(DEVICE)
    q, k = (torch.randn(tokens, shapes.heads, shapes.qk, device=DEVICE).to(dtype) for _ in range(2))
    v, grad = (torch.randn(tokens, shapes.heads, shapes.v, device=DEVICE).to(dtype) for _ in range(2))
    mask = hstu_attention.Mask(alpha=1 / math.sqrt(shapes.qk), length=float(longest), longest=longest)
    flops = float((length_B.astype(np.float64) ** 2).sum()) * shapes.heads * (shapes.qk + shapes.v)
    forward = ns_of(lambda: hstu_attention.forward(q, k, v, offsets_B1, mask))
    backward = ns_of(lambda: hstu_attention.backward(grad, q, k, v, offsets_B1, mask))
    return 1e9 * flops / forward, 2.5e9 * flops / backward
