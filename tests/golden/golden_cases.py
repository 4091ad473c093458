"""The golden numbers of public implementations: where they are, and how close ours must be."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = Path(os.environ.get("RECPERF_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))
RTOL, ATOL = 2e-4, 1e-5
"""Relative, and absolute as a share of the largest entry."""
INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
"""Whether tests run Triton kernels in its interpreter."""


def cases(kind: str) -> list[Any]:
    """Every case of a kind, as parameters of a test."""
    paths = sorted((FOLDER / kind).glob("*.npz"))
    skip = pytest.mark.skip(f"no golden numbers at {FOLDER / kind}; set RECPERF_GOLDEN")
    return [pytest.param(path, id=path.stem) for path in paths] or [pytest.param(None, marks=skip, id="none")]


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
