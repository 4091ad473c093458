"""The backward pass of a linear layer's ReLU with the gradient of its bias: `reference` (plain torch), `native`
(C, a CPU, in place) and `triton` (a GPU).

implementation, why = choose("auto", device)
gradient_BN, bias_SN = implementation.backward(gradient_BN, activation_BN)      # bias_SN.sum(0) is the bias gradient
gradient_BN, bias_SN = implementation.outer_backward(gradient_B1, weight_1N, activation_BN)
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
        why = f"the layers are on {device.type}" if name == "auto" else "asked for"
        return _module(wanted), f"{wanted}: {why}"
    if name == "auto":
        return reference, f"reference: {lack}"
    raise MachineError(f"the {name} ReLU cannot be used: {lack}", fix="--fast.mlp plain")


def _module(name: Name) -> ModuleType:
    if name == "native":
        return native
    from . import triton

    return triton


def _problem(name: Name, device: torch.device) -> str | None:
    if name == "triton":
        return problem(device)
    if device.type != "cpu":
        return f"the layers are on {device.type}"
    found = native.library()
    return found if isinstance(found, str) else None
