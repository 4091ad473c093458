"""Largest allowed relative error of each implementation against float64 (norm of the difference over the norm of the
exact result) for outputs and gradients, of all tokens or the last. Tests fail above it.

Half precision rounds what enters products and what comes out. The kernels' SiLU on NVIDIA is good to 11 bits there, and
their float32 products to 21. Triton's interpreter cuts bfloat16 off instead of rounding.
"""

from __future__ import annotations

import os

import torch

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LIMITS = {
    "reference": (1e-15, 5e-7, 4e-4, 3e-3),
    "native": (1e-15, 5e-7, 4e-4, 3e-3),
    "triton": (1e-15, 2e-6, 1.5e-3, 6e-3),
    "interpreted": (1e-15, 5e-7, 7e-4, 1.2e-2),
}
"""Of each implementation, in the order of `DTYPES`."""


def limit(body: str, dtype: torch.dtype) -> float:
    interpreted = body == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return LIMITS["interpreted" if interpreted else body][DTYPES.index(dtype)]
