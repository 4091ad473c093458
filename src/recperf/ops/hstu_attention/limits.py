"""Largest allowed relative error of each implementation against float64 (norm of the difference over the norm of the
exact result) for outputs and gradients, of all tokens or the last. Tests fail above it.

Half precision rounds what enters products and what comes out. The kernels' SiLU on NVIDIA is good to 11 bits there, and
their float32 products to 21. Triton's interpreter cuts bfloat16 off instead of rounding.
"""

from __future__ import annotations

import os

import torch

LIMITS: dict[str, dict[torch.dtype, float]] = {
    "reference": {
        torch.float64: 1e-15,
        torch.float32: 5e-7,
        torch.float16: 4e-4,
        torch.bfloat16: 3e-3,
    },
    "native": {
        torch.float64: 1e-15,
        torch.float32: 5e-7,
        torch.float16: 4e-4,
        torch.bfloat16: 3e-3,
    },
    "triton": {
        torch.float64: 1e-15,
        torch.float32: 2e-6,
        torch.float16: 1.5e-3,
        torch.bfloat16: 6e-3,
    },
    "interpreted": {
        torch.float64: 1e-15,
        torch.float32: 5e-7,
        torch.float16: 7e-4,
        torch.bfloat16: 1.2e-2,
    },
}


def limit(body: str, dtype: torch.dtype) -> float:
    interpreted = body == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return LIMITS["interpreted" if interpreted else body][dtype]
