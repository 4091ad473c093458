"""The device, the settings that torch runs with and the implementations of a step, with the reason for each: chosen by
fixed rules, so that they are the same in a repeat."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils import deterministic as memory

from ..errors import MachineError, notice_once
from ..machine import bfloat16_instructions, usable_cores
from ..ops.choice import triton_problem
from .config import FastConfig, TrainConfig

if TYPE_CHECKING:
    from ..measure.fixes import Fix

SMALL_PRODUCT_FLOPS = 4_000_000
"""Below this a call of oneDNN costs more than it saves on ARM (measured on two Neoverse-N1 cores)."""
LARGE_PRODUCT_FLOPS = 500_000_000
"""From here on torch's BLAS with several threads is at least as fast there."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    device: torch.device
    device_name: str
    threads: int
    onednn: bool
    reasons: dict[str, str]
    precision: str = "float32"
    """Precision of large matrix products: float32, tf32 or bfloat16."""
    others_exact: bool = False
    """Whether smaller products stay float32 whatever the precision of large ones."""
    deterministic: bool = False
    """Whether a GPU may only use kernels whose results do not vary; a CPU's never do."""

    @property
    def sync(self) -> Callable[[], None] | None:
        """Waits for the device's kernels; none on a CPU."""
        return torch.cuda.synchronize if self.device.type == "cuda" else None


def choose(config: TrainConfig, *, largest_product_flops: int) -> Settings:
    """Settings for a model whose largest matrix product has this many FLOPs."""
    small = largest_product_flops < SMALL_PRODUCT_FLOPS
    device, why_device = _device(config.device)
    if config.threads:
        threads, why_threads = config.threads, "requested"
    elif small:
        threads, why_threads = 1, "matrix products too small to share between threads"
    else:
        threads, why_threads = torch.get_num_threads(), "torch's own choice"
        if threads > usable_cores():
            threads, why_threads = usable_cores(), "the cores that this process may use"
    arm = platform.machine() in ("aarch64", "arm64")
    if config.onednn != "auto":
        onednn, why_onednn = config.onednn == "on", "requested"
    elif small and arm:
        onednn, why_onednn = False, f"ARM, and no product reaches {SMALL_PRODUCT_FLOPS / 1e6:.0f} MFLOP"
    elif arm and threads > 1 and largest_product_flops >= LARGE_PRODUCT_FLOPS:
        onednn, why_onednn = (
            False,
            f"ARM, several threads, and a product of {LARGE_PRODUCT_FLOPS / 1e9:g} GFLOP or more",
        )
    else:
        onednn, why_onednn = True, "torch's own choice"
    reasons = {
        "device": f"{device.type}: {why_device}",
        "threads": f"{threads}: {why_threads}",
        "onednn": f"{'on' if onednn else 'off'}: {why_onednn}",
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Settings(device=device, device_name=name, threads=threads, onednn=onednn, reasons=reasons)


def repeatable(settings: Settings) -> Settings:
    """The same settings with bit-identical results in every repeat and after every resume."""
    on = settings.device.type == "cuda"
    why = "requested; slower" if on else "requested; a CPU's results never vary"
    return replace(settings, deterministic=on, reasons={**settings.reasons, "deterministic": f"yes: {why}"})


def cpu_fixes(config: Any, settings: Settings) -> tuple[Fix, ...]:
    """Fixes that any workload on a CPU has: more threads, or oneDNN, where the user set less."""
    from ..measure.fixes import Fix

    if settings.device.type != "cpu":
        return ()
    fixes = []
    cores = usable_cores()
    # Only what the user set: the automatic choice has its reasons, which the run records.
    if 0 < config.train.threads < cores:
        changed = replace(config, train=replace(config.train, threads=cores))
        title = f"{cores} threads per operator instead of {settings.threads}"
        fixes.append(
            Fix(name="threads", title=title, switch=f"--train.threads {cores}", config=changed, tolerance=1e-4)
        )
    if config.train.onednn == "off" and not settings.onednn:
        changed = replace(config, train=replace(config.train, onednn="on"))
        title = "matrix products by oneDNN"
        fixes.append(Fix(name="onednn", title=title, switch="--train.onednn on", config=changed, tolerance=1e-4))
    return tuple(fixes)


def _device(requested: str) -> tuple[torch.device, str]:
    if requested == "cuda" and not torch.cuda.is_available():
        raise MachineError("torch sees no GPU here", fix="--train.device cpu, or recperf doctor")
    if requested != "auto":
        return torch.device(requested), "requested"
    if torch.cuda.is_available():
        return torch.device("cuda"), "torch sees a GPU"
    return torch.device("cpu"), "torch sees no GPU"


def free_gpu_bytes(device: torch.device | str = "cuda") -> int:
    """Memory of a GPU that a new model can have. What torch's allocator keeps of an earlier one is free, too."""
    left = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + left


def resident_threads(device: torch.device) -> int:
    """Threads that a GPU can hold at once."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count * properties.max_threads_per_multi_processor)


@contextmanager
def applied(settings: Settings) -> Iterator[None]:
    """Use the settings inside, and restore the previous ones afterwards."""
    threads, onednn = torch.get_num_threads(), bool(torch.backends.mkldnn.enabled)
    tf32, strict = torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(settings.threads)
    allow_onednn(settings.onednn)
    torch.backends.cuda.matmul.allow_tf32 = settings.precision != "float32" and not settings.others_exact
    if settings.deterministic:
        # Torch requires it: otherwise cuBLAS chooses its workspace, and with it the order of sums, at run time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Torch would also fill every new tensor; whatever is read here has been written.
        filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        allow_onednn(onednn)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        if settings.deterministic:
            # Only where it was set: the call imports torch's compiler, which takes seconds.
            torch.use_deterministic_algorithms(strict)
            memory.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def allow_onednn(allowed: bool) -> None:
    # torch types this switch as the property that implements it.
    torch.backends.mkldnn.enabled = allowed  # type: ignore[assignment]


Requested = Literal["auto", "on", "off"]
SWITCH, FAST_SWITCH = "--train.graph", "--fast.graph"
BETWEEN_RANKS = "ranks communicate in the middle of a step"
SLOTS_ON_HOST = "the slots of a batch's rows are found on the host"
FIXED_SHAPES = "a GPU, and shapes that do not change"


def choose_graph(requested: Requested, device: torch.device, lack: str, *, why: str, switch: str) -> tuple[bool, str]:
    """Whether steps are to run as a CUDA graph, and the reason as the settings of a run state it.

    `lack` is what the workload lacks for a graph, if anything, and `why` the reason for one; a graph that is requested
    in spite of a lack is an error that names the `switch`.
    """
    lack = lack if device.type == "cuda" else "no GPU"
    if requested == "on" and lack:
        raise MachineError(f"a step cannot be a CUDA graph: {lack}", fix=f"{switch} off")
    if requested != "auto":
        return requested == "on", f"{requested}: requested"
    return not lack, f"off: {lack}" if lack else f"on: {why}"


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The implementations in use."""

    input: str
    graph: bool
    precision: str
    embedding: bool
    interaction: bool
    mlp: bool
    optimizer: bool
    reasons: dict[str, str]

    @property
    def low(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


Decide = Callable[[str, str, str], str]
"""Records the value of a switch and the reason for it, and returns the value."""


def resolve(
    fast: FastConfig, device: torch.device, *, drawn: bool, slices: int, optimizer: str, lack: str = ""
) -> Switches:
    """`drawn`: batches are synthetic, not read from files; `slices`: micro-batches; `optimizer`: the tables'; `lack`:
    what the workload lacks for a CUDA graph, if anything."""
    cuda = device.type == "cuda"
    reasons: dict[str, str] = {}

    def decided(name: str, value: str, why: str) -> str:
        reasons[name] = f"{value}: {why}"
        return value

    if fast.input != "auto":
        if fast.input == "device" and not drawn:
            raise MachineError("rows of a file cannot be drawn on the device", fix="--fast.input pinned")
        source = decided("input", fast.input, "requested")
    elif drawn:
        source = decided("input", "device", "synthetic batches are drawn where they are used")
    else:
        source = decided("input", "pinned" if cuda else "pageable", "rows are read from files")
    precision = _precision(fast, cuda, decided)
    fused = {}
    for name in ("embedding", "interaction", "mlp", "optimizer"):
        fused[name] = _fused(name, getattr(fast, name), device, decided)
    sparse = optimizer != "adamw"
    if not lack and slices > 1:
        lack = "a batch is split into micro-batches"
    elif not lack and not sparse:
        lack = "adamw needs a dense gradient of the tables, whose lookups read sizes on the host"
    elif not lack and not fused["embedding"]:
        lack = "plain embeddings have shapes that depend on a batch's distinct rows"
    graph, why = choose_graph(fast.graph, device, lack, why=FIXED_SHAPES, switch=FAST_SWITCH)
    decided("graph", *why.split(": ", 1))
    if cuda and not (fused["embedding"] and sparse):
        decided("deterministic", "no", "torch adds the tables' gradients by atomics; the fused embedding sorts ids")
    else:
        decided("deterministic", "yes", "no implementation in use varies from run to run")
    return Switches(input=source, graph=graph, precision=precision, reasons=reasons, **fused)


def _precision(fast: FastConfig, cuda: bool, decided: Decide) -> str:
    if fast.precision != "auto":
        if fast.precision == "tf32" and not cuda:
            raise MachineError("a CPU has no tf32", fix="--fast.precision float32")
        return decided("precision", fast.precision, _requested(fast.precision, cuda))
    if cuda and torch.cuda.get_device_capability()[0] >= 8:
        return decided("precision", "bfloat16", "a GPU that supports it; sums, weights and their gradients in float32")
    return decided("precision", "float32", "a CPU" if not cuda else "a GPU without bfloat16")


def _requested(precision: str, cuda: bool) -> str:
    if precision != "bfloat16" or cuda:
        return "requested"
    instructions = bfloat16_instructions()
    if instructions is None:
        return "requested; faster than float32 only on a CPU with instructions for it, which the system does not say"
    if instructions:
        return f"requested; this CPU has {instructions} instructions for it"
    notice_once("this CPU has no instructions for bfloat16: --fast.precision float32 is faster")
    return "requested; slower than float32, since this CPU has no instructions for it"


def _fused(name: str, requested: str, device: torch.device, decided: Decide) -> bool:
    """Whether to use the fused implementation of a part."""
    cpu = device.type == "cpu"
    lack = None if cpu else triton_problem(device)
    if requested == "fused" and lack and not cpu:
        raise MachineError(f"the fused {name} cannot be used: {lack}", fix=f"--fast.{name} plain")
    if requested != "auto":
        return decided(name, requested, "requested") == "fused"
    return decided(name, "plain" if lack else "fused", lack or f"on {device.type}") == "fused"
