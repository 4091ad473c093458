"""The backward pass of a linear layer's ReLU with the gradient of its bias: `reference` (plain torch) and `triton`.

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
from . import reference

Name = Literal["auto", "reference", "triton"]


def choose(name: Name, device: torch.device) -> tuple[ModuleType, str]:
    """The implementation and why; an explicit wish that cannot be met is an error."""
    if name == "reference":
        return reference, "reference: asked for"
    # The interpreter is for tests that ask for it by name.
    lack = f"the data is on {device.type}" if name == "auto" and device.type != "cuda" else problem(device)
    if lack is None:
        from . import triton

        return triton, "triton: asked for" if name == "triton" else f"triton: the layers are on {device.type}"
    if name == "triton":
        raise MachineError(f"the Triton ReLU cannot be used: {lack}", fix="--fast.mlp plain")
    return reference, f"reference: {lack}"
