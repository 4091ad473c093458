"""The backward pass of a ReLU and of the bias before it in plain torch.

Shapes: B samples, N outputs of the layer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def backward(gradient_BN: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before the ReLU, and that of the bias in float32."""
    gradient_BN = torch.ops.aten.threshold_backward(gradient_BN, activation_BN, 0)
    return gradient_BN, gradient_BN.sum(0, dtype=torch.float32)
