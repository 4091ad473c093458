"""The backward pass of a ReLU and of the bias before it in C: torch needs two passes and new memory.

Shapes: B samples, N outputs of the layer, K of the layer above it, S stripes of samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import ANY, address
from ..compile import I64, POINTER, even_cuts, native_library, share, usable
from ..operators import operator
from . import reference
from .reference import copy as copy
from .reference import descend as descend
from .reference import forward_backward as forward_backward

STRIPE = 64
"""Samples per partial sum of the bias gradient: independent of the number of threads, for equal bits."""


library = native_library(__file__, {"relu_backward": [POINTER] * 3 + [I64] * 5})
"""Returns the compiled library, or the reason why it cannot be used."""


@operator("relu_backward")
def backward(gradient_BN: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before the ReLU, which overwrites `gradient_BN`, and that of the bias as stripes to be summed."""
    if gradient_BN.dtype != torch.float32:
        return reference.backward(gradient_BN, activation_BN)
    gradient_BN, activation_BN = gradient_BN.contiguous(), activation_BN.contiguous()
    gradient = address("gradient_BN", gradient_BN, torch.float32, (ANY, ANY))
    samples, outputs = gradient_BN.shape
    activation = address("activation_BN", activation_BN, torch.float32, (samples, outputs))
    stripes = -(-samples // STRIPE)
    sums_SN = torch.empty(stripes, outputs)
    call, places = usable(library()).relu_backward, (gradient, activation, sums_SN.data_ptr())

    def work(first: int, last: int) -> None:
        call(*places, first, last, STRIPE, samples, outputs)

    share(work, even_cuts(stripes, max(1, min(torch.get_num_threads(), stripes))))
    return gradient_BN, sums_SN


def outer_backward(gradient_B1: Tensor, weight_1N: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The same below a layer of one output, whose input gradient is the outer product of the first two."""
    return backward(gradient_B1 * weight_1N, activation_BN)


def product_backward(gradient_BK: Tensor, weight_KN: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The same below a layer of several outputs, whose input gradient is the product of the first two."""
    return backward(gradient_BK.mm(weight_KN), activation_BN)
