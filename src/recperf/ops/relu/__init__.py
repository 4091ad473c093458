"""The backward pass of a linear layer's ReLU with the gradient of its bias: `reference` (plain torch), `native`
(C, a CPU, in place) and `triton` (a GPU).

implementation, why = choose("auto", device)
gradient_BN, bias_SN = implementation.backward(gradient_BN, activation_BN)      # bias_SN.sum(0) is the bias gradient
gradient_BN, bias_SN = implementation.outer_backward(gradient_B1, weight_1N, activation_BN)
"""

from __future__ import annotations

from types import ModuleType

import torch

from .. import choice
from ..choice import Name

__all__ = ["Name", "choose"]


def choose(name: Name, device: torch.device) -> tuple[ModuleType, str]:
    """The implementation and why; an explicit wish that cannot be met is an error."""
    return choice.choose(__name__, name, device, what="ReLU", subject="the layers", fix="--fast.mlp plain")
