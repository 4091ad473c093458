"""The backward pass of a ReLU and of the bias before it in plain torch.

Shapes: B samples, N outputs of the layer, K of the layer above it, S = 1 stripe of samples.
"""

from __future__ import annotations

import torch
from torch import Tensor


def backward(gradient_BN: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before the ReLU, and that of the bias in float32, as stripes that are still to be summed."""
    gradient_BN = torch.ops.aten.threshold_backward(gradient_BN, activation_BN, 0)
    return gradient_BN, gradient_BN.sum(0, dtype=torch.float32, keepdim=True)


def outer_backward(gradient_B1: Tensor, weight_1N: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The same below a layer of one output, whose input gradient is the outer product of the first two."""
    return backward(gradient_B1 * weight_1N, activation_BN)


def product_backward(gradient_BK: Tensor, weight_KN: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The same below a layer of several outputs, whose input gradient is the product of the first two."""
    return backward(gradient_BK.mm(weight_KN), activation_BN)
