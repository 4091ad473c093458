"""Rates of this machine for plans: products and attention at the model's shapes, copies, messages between processes.

Stored by host, so that later plans of the same model and device use them without torch; measuring needs torch. A GPU is
measured where there is one, else one core of the CPU while a second process does the same on another.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import places
from ..config import from_json
from ..errors import MachineError, RecperfError
from ..files import make_folder, write_json
from ..folders import temporary_folder
from ..jsonfile import Struct, read, read_sealed, sealed
from ..machine import available_bytes, fingerprint, host_facts
from ..measure.peaks import quiet_now
from ..measure.peaks.other_work import DISTURBED, OtherWork
from ..stop import end_with_parent
from .devices import KNOWN, Attention, Device, Rates
from .network import Network
from .work import Lengths, Shapes, Work

if TYPE_CHECKING:
    import torch

FORM = ("recperf calibrations", 2)
MOST_ROWS, MOST_SEQUENCES = 1 << 18, 128
"""Rows of the product and rows of attention on a GPU: enough to fill it."""
CORE_FLOPS = 1e10
"""FLOPs that a core is timed with at most; a batch of the published model would take it minutes."""
SMALL, LARGE = 1 << 10, 1 << 24
"""Bytes of the messages between two processes."""
SCALES = (0.25, 1.0, 1.5)
"""Lengths of rows at which attention is timed, over those of the model: `--history` plans shorter and longer ones."""
SAME_MEMORY = 0.05
"""A GPU whose memory differs from that of the known one by a larger share is another one."""
COPIED = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Bytes of the buffer that is copied."""
TIMEOUT = 300
"""Seconds that the two processes may take."""
Say = Callable[[str], None]
Timer = Callable[[Callable[[], object]], float]
"""Nanoseconds of a call."""


@dataclass(frozen=True)
class Model:
    """What the rates of a device depend on."""

    shapes: Shapes
    precision: str
    lengths: Lengths
    attention_length: float

    @classmethod
    def of(cls, work: Work) -> Model:
        return cls(work.shapes, work.precision, work.lengths, work.attention_length)


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
    latency_s: float | None = None
    """Seconds of a small message between two processes of this host."""
    link_bytes_per_s: float | None = None
    """Bandwidth of a large one."""
    measured: str = ""
    other_work: float | None = None
    """Share of the cores that other processes took meanwhile."""

    def applied(self, device: Device, precision: str) -> Device:
        """The device with these rates instead of assumed ones, and a GPU with the memory that it has."""
        share, own_link = device.efficiency, self.link_bytes_per_s
        measured = replace(
            device,
            memory_bytes=device.memory_bytes if device.shared else self.memory_bytes,
            gemm=replace(
                device.gemm_rates, **{precision if device.gemm_rates.has(precision) else "float32": self.product}
            ),
            copy_bytes_per_s=self.copy,
            attention=self.attention or device.attention,
            efficiency=replace(
                share,
                products=1.0,
                origin=f"products, attention and copies measured here at {self.measured}{self.disturbance}; "
                f"passes: {share.origin}",
            ),
            calibrated=True,
            origin=f"{device.origin}; calibrated here",
        )
        if own_link is None:
            return measured
        efficiency = replace(measured.efficiency, link=1.0)
        return replace(measured, link_bytes_per_s=own_link, efficiency=efficiency)

    @property
    def disturbance(self) -> str:
        others = self.other_work or 0.0
        return f" beside {others:.0%} other work, so rates may be too low" if others > DISTURBED else ""

    def network(self) -> Network | None:
        """Messages between processes of this host."""
        if self.latency_s is None or self.link_bytes_per_s is None:
            return None
        return Network(
            name="gloo",
            bytes_per_s=self.link_bytes_per_s,
            latency_s=self.latency_s,
            link_latency_s=self.latency_s,
            ranks_per_node=1 << 16,
            origin=f"measured between two processes here at {self.measured}",
        )


class _Stored(Struct):
    format: str
    version: int
    entries: dict[str, Calibration]
    """By device and model."""


def stored(device: str, work: Work) -> Calibration | None:
    """What an earlier call measured here for this model, and no torch is needed to read."""
    try:
        return _read().entries[_key(device, Model.of(work))]
    except (RecperfError, KeyError):
        # Not measured, or damaged: it is measured again.
        return None


def of_cpu(work: Work, batch: int, say: Say) -> Calibration:
    """The stored rates of this CPU; measured where there are none, or again where only those were disturbed."""
    rates = stored("cpu", work)
    if rates is not None and not (rates.disturbance and quiet_now()):
        return rates
    return measure(work, batch, say, on_cpu=True)


def measure(work: Work, batch: int, say: Say, *, on_cpu: bool = False) -> Calibration:
    """Measure the GPU at hand, or the CPU where there is none, and store it."""
    import torch

    model = Model.of(work)
    if torch.cuda.is_available() and not on_cpu:
        name = torch.cuda.get_device_name()
        say(f"calibrating {name}: product, attention and copy at the shapes of this model")
        rates = _of_gpu(model, batch)
    else:
        say("calibrating one core beside a second one that is as busy: product, attention, copy, messages")
        rates = _of_processes(model, batch)
    _store(rates, model, say)
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
        flops=Rates(float32=calibration.product),
        link_bytes_per_s=32e9,
        origin="measured; links assumed",
    )


def _path() -> Path:
    return places.home() / "calibrations" / f"{fingerprint(host_facts())}.json"


def _read() -> _Stored:
    return read_sealed(_path(), FORM, _Stored, fix="recperf plan measures again")


def _key(device: str, model: Model) -> str:
    return f"{device}, {model.precision}, {model.shapes}, {model.attention_length:.0f} tokens"


def _store(calibration: Calibration, model: Model, say: Say) -> None:
    path = _path()
    try:
        known = _read()
    except RecperfError:
        known = _Stored(*FORM, entries={})
    try:
        make_folder(path.parent)
        known.entries[_key(calibration.device, model)] = calibration
        write_json(path, sealed(known))
    except MachineError as error:
        say(f"the calibration is not stored: {error.what}")


def _of_gpu(model: Model, batch: int) -> Calibration:
    import torch

    from ..measure.peaks.gpu import Gpu
    from ..measure.peaks.sampling import QUICK, Sampler

    sampler = Sampler(QUICK)
    gpu = Gpu(sampler, lambda _: None, lambda _: None)
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    name = card_name(torch.cuda.get_device_name(), memory)

    def ns_of(once: Callable[[], object]) -> float:
        return median(sampler.readings(gpu.timed(once)))

    return _rates(model, min(batch, MOST_SEQUENCES), "cuda", ns_of, name=name, memory=memory)


def _rates(model: Model, batch: int, device: str, ns_of: Timer, *, name: str, memory: int) -> Calibration:
    """FLOP/s of the product and of both passes of attention by length, and bytes per second of a copy."""
    import torch

    shapes = model.shapes
    dtype = torch.bfloat16 if model.precision == "bfloat16" and device == "cuda" else torch.float32
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if model.precision == "tf32" else "highest")
    try:
        rows = min(MOST_ROWS, max(1, round(shapes.rows_per_sample * batch)))
        x, weight, grad = (
            torch.randn(*size, device=device).to(dtype)
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
    scales = {max(1, round(scale * model.attention_length)): scale for scale in SCALES if shapes.heads}
    rates = [(length, *_attention_rates(model, scale, batch, device, dtype, ns_of)) for length, scale in scales.items()]
    attention = None
    if rates:
        lengths, forward, backward = zip(*rates)
        attention = Attention(
            lengths=lengths, forward=forward, backward=backward, precision=model.precision, origin="measured here"
        )
    buffer = torch.ones(COPIED[device] // 4, device=device)
    half = buffer.numel() // 2
    return Calibration(
        device=name,
        product=product,
        copy=2e9 * 4 * half / ns_of(lambda: buffer[:half].copy_(buffer[half : 2 * half])),
        memory_bytes=memory,
        attention=attention,
        measured=datetime.now(UTC).isoformat(timespec="minutes"),
    )


def _attention_rates(
    model: Model, scale: float, batch: int, device: str, dtype: torch.dtype, ns_of: Timer
) -> tuple[float, float]:
    """FLOP/s of both passes over rows `scale` times as long as the model's."""
    import torch

    from ..ops import hstu_attention

    shapes = model.shapes
    # In any order, as rows of a batch are: which rows come last decides how long some cores have nothing to do.
    place_B = np.random.default_rng(0).permutation(
        ((np.arange(batch) + 0.5) / batch * len(model.lengths)).astype(np.int64)
    )
    length_B = np.maximum(1, np.round(scale * np.asarray(model.lengths)[place_B])).astype(np.int64)
    tokens, longest = int(length_B.sum()), int(length_B.max())
    offsets_B1 = torch.from_numpy(np.concatenate([[0], length_B.cumsum()])).to(device)
    q, k = (torch.randn(tokens, shapes.heads, shapes.qk, device=device).to(dtype) for _ in range(2))
    v, grad = (torch.randn(tokens, shapes.heads, shapes.v, device=device).to(dtype) for _ in range(2))
    mask = hstu_attention.Mask(alpha=1 / math.sqrt(shapes.qk), length=float(longest), longest=longest)
    flops = float((length_B.astype(np.float64) ** 2).sum()) * shapes.heads * (shapes.qk + shapes.v)
    forward = ns_of(lambda: hstu_attention.forward(q, k, v, offsets_B1, mask))
    backward = ns_of(lambda: hstu_attention.backward(grad, q, k, v, offsets_B1, mask))
    return 1e9 * flops / forward, 2.5e9 * flops / backward


def _of_processes(model: Model, batch: int) -> Calibration:
    context, others = multiprocessing.get_context("spawn"), OtherWork()
    with temporary_folder() as folder:
        samples = min(batch, _timed_batch(model))
        arguments = (os.getpid(), str(folder / "meeting"), folder / "rates.json", model, samples)
        processes = [context.Process(target=_process, args=(rank, *arguments)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT)
            if process.is_alive():
                process.kill()
        if any(process.exitcode for process in processes) or not (folder / "rates.json").exists():
            raise MachineError(
                "two processes of this machine could not be timed beside each other",
                fix="recperf doctor; or a device file: docs/planning.md",
            )
        rates = from_json(Calibration, read(folder / "rates.json"), field="calibration")
    return replace(rates, other_work=others.share())


def _timed_batch(model: Model) -> int:
    """How many samples a core computes in a reading that takes about a second at most."""
    shapes = model.shapes
    flops = 6.0 * shapes.rows_per_sample * shapes.inputs * shapes.outputs
    flops += max(SCALES) ** 2 * float(np.mean(np.square(model.lengths or (0,)))) * shapes.heads * (shapes.qk + shapes.v)
    return max(1, int(CORE_FLOPS / max(1.0, flops)))


def _process(rank: int, parent: int, meeting: str, file: Path, model: Model, batch: int) -> None:
    """One of the two processes; both measure everything at the same time, and the first one's figures count."""
    import torch
    from torch import distributed

    from ..measure.peaks.sampling import QUICK, Sampler

    end_with_parent(parent)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    sampler = Sampler(QUICK)
    latency_s, link_bytes_per_s = _messages(distributed)

    def ns_of(once: Callable[[], object]) -> float:
        # Two processes and whatever else runs share the cores: the fastest reading is the least disturbed one.
        return float(min(sampler.readings(partial(_timed, once))))

    rates = _rates(model, batch, "cpu", ns_of, name="cpu", memory=available_bytes())
    if rank == 0:
        rates = replace(rates, latency_s=latency_s, link_bytes_per_s=link_bytes_per_s)
        write_json(file, rates)
    distributed.barrier()
    distributed.destroy_process_group()


def _timed(once: Callable[[], object]) -> float:
    began = perf_counter_ns()
    once()
    return perf_counter_ns() - began


def _messages(distributed: Any) -> tuple[float, float]:
    """Seconds of a small all-to-all and the bandwidth of a large one: the fastest of some, as for every ceiling."""
    import torch

    def fastest(bytes_: int, calls: int) -> float:
        sent, received = torch.ones(bytes_ // 4), torch.empty(bytes_ // 4)
        seconds = []
        for _ in range(calls):
            distributed.barrier()
            seconds.append(1e-9 * _timed(lambda: distributed.all_to_all_single(received, sent)))
        return min(seconds[2:])

    small, large = fastest(SMALL, 100), fastest(LARGE, 8)
    # Half of the bytes stay in the process.
    return small, (LARGE - SMALL) / 2 / max(1e-9, large - small)
