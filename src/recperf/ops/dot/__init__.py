"""The dot interaction: `reference` (plain torch, any device), `native` (C, a CPU) and `triton` (a GPU, one kernel
each way).

implementation, why = choose("auto", device)
met_BW, saved = implementation.forward(dense_BD, sparse_FBD, diagonal=False)
dense_BD, sparse_FBD = implementation.backward(saved, gradient_BW, diagonal=False)      # gradients
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from ...errors import MachineError
from ..triton_problem import problem
from . import native, reference

Name = Literal["auto", "reference", "native", "triton"]


def choose(name: Name, device: torch.device) -> tuple[ModuleType, str]:
    """The implementation and why; an explicit wish that cannot be met is an error."""
    if name == "reference":
        return reference, "reference: asked for"
    wanted = name
    if name == "auto":
        wanted = "triton" if device.type == "cuda" else "native"
    lack = _problem(wanted, device)
    if lack is None:
        return _module(
            wanted
        ), f"{wanted}: asked for" if name != "auto" else f"{wanted}: the vectors are on {device.type}"
    if name == "auto":
        return reference, f"reference: {lack}"
    raise MachineError(f"the {name} interaction cannot be used: {lack}", fix="--fast.interaction plain")


def _module(name: Name) -> ModuleType:
    if name == "native":
        return native
    from . import triton

    return triton


def _problem(name: Name, device: torch.device) -> str | None:
    if name == "triton":
        return problem(device)
    if device.type != "cpu":
        return f"the vectors are on {device.type}"
    found = native.library()
    return found if isinstance(found, str) else None
