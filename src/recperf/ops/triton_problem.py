"""Whether Triton kernels can run on a device."""

from __future__ import annotations

import importlib.util
import os

import torch


def problem(device: torch.device) -> str | None:
    """Why they cannot; none when they can. Triton's interpreter, meant for tests, runs them anywhere."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the data is on {device.type}"
    return None
