"""What kernels ask about the GPU that they run on, or the interpreter: the precision of products, room on the chip."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_nvidia(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.version.hip is None and not interpreted()


def tf32(tensor: Tensor) -> bool:
    """Whether products of float32 may be rounded to TF32: torch's own setting."""
    return on_nvidia(tensor) and torch.backends.cuda.matmul.allow_tf32


def precision(tensor: Tensor, *, rounded: bool = False) -> str:
    """The precision of a kernel's products; "wide" is for the interpreter, which has no bfloat16.

    Float32 is rounded to TF32 only if `rounded`. Otherwise three products of such units make one, good to 21 bits:
    plain instructions would do the same at a fraction of the rate and take minutes to compile.
    """
    if tensor.dtype == torch.float32 and on_nvidia(tensor):
        return "tf32" if rounded else "tf32x3"
    return "wide" if tensor.dtype == torch.bfloat16 and interpreted() else "ieee"


@functools.cache
def roomy(device: torch.device) -> bool:
    """Whether a program may have 200 KiB of shared memory, as on Hopper and after, and in the interpreter."""
    if device.type != "cuda":
        return True
    return bool(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 200 << 10)
