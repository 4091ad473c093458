"""The golden numbers of public implementations as cases of tests, and how close ours must be."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch
from golden_numbers import golden
from torch import Tensor

from recperf.ops.bag import native

RTOL, ATOL = 2e-4, 1e-5
"""Relative, and absolute as a share of the largest entry."""
INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
"""Whether tests run Triton kernels in its interpreter."""
needs_native = pytest.mark.skipif(isinstance(native.library(), str), reason=str(native.library()))
needs_triton = pytest.mark.skipif(not INTERPRETED, reason="no triton, or a GPU, where tests/gpu runs the kernels")
BAGS = ["reference", pytest.param("native", marks=needs_native), pytest.param("triton", marks=needs_triton)]
"""The implementations of bags, as parameters of a test with the fixture `interpreter`."""


def cases(kind: str) -> list[Any]:
    """Every case of a kind, as parameters of a test."""
    return [pytest.param(path, id=path.stem) for path in golden(f"{kind}/*.npz")]


def interpret(*ops: str) -> None:
    """Import the kernels of these ops for the interpreter; other tests must not see the variable that asks for it."""
    if INTERPRETED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            for op in ops:
                importlib.import_module(f"recperf.ops.{op}.triton")


def close(actual: Tensor, expected: Tensor, name: str = "") -> None:
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.detach().to(expected),
        expected,
        rtol=RTOL,
        atol=ATOL * largest,
        msg=lambda message: f"{name}: {message}",
    )


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ATTENTION_LIMITS = {
    "reference": (1e-15, 5e-7, 4e-4, 3e-3),
    "native": (1e-15, 5e-7, 4e-4, 3e-3),
    "triton": (1e-15, 2e-6, 1.5e-3, 6e-3),
    "interpreted": (1e-15, 5e-7, 7e-4, 1.2e-2),
}
"""Largest relative error of each implementation of attention against float64 (norm of the difference over the norm of
the exact result), in the order of `DTYPES`. Half precision rounds what enters products and what comes out. The kernels'
SiLU on NVIDIA is good to 11 bits there, and their float32 products to 21. Triton's interpreter cuts bfloat16 off
instead of rounding."""


def attention_limit(body: str, dtype: torch.dtype) -> float:
    interpreted = body == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return ATTENTION_LIMITS["interpreted" if interpreted else body][DTYPES.index(dtype)]
