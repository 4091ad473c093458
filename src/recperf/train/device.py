"""The device and the settings that torch runs with: chosen by fixed rules, so that they are the same in a repeat."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.utils import deterministic as memory

from ..errors import MachineError
from ..machine import usable_cores
from .config import TrainConfig

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
