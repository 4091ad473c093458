"""The dot interaction: `reference` (plain torch, any device) and `triton` (a GPU, one kernel each way).

implementation, why = choose("auto", device)
met_BW = implementation.forward(dense_BD, sparse_FBD, diagonal=False)
dense, sparse = implementation.backward(dense_BD, sparse_FBD, gradient_BW, diagonal=False)
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
    lack = problem(device)
    if lack is None:
        from . import triton

        return triton, "triton: asked for" if name == "triton" else f"triton: the vectors are on {device.type}"
    if name == "triton":
        raise MachineError(f"the Triton interaction cannot be used: {lack}", fix="--fast.interaction plain")
    return reference, f"reference: {lack}"
