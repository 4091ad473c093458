"""The backward pass of a ReLU and of the bias before it by a small C file: torch takes two passes and fresh memory.

Shapes: B samples, N outputs of the layer, S stripes of samples.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ..compile import even_cuts, load, share
from . import reference

SOURCE = Path(__file__).with_name("native.c")
STRIPE = 64
"""Samples whose bias gradients are summed together, whatever the number of threads: equal bits."""

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    loaded = load(SOURCE)
    if isinstance(loaded, str):
        return loaded
    loaded.relu_backward.argtypes = [_PTR] * 3 + [_I64] * 5
    return loaded


def backward(gradient_BN: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before the ReLU, in the memory of the one given, and that of the bias as stripes to be summed."""
    if gradient_BN.dtype != torch.float32:
        return reference.backward(gradient_BN, activation_BN)
    found = library()
    assert not isinstance(found, str), found
    samples, outputs = gradient_BN.shape
    gradient_BN, activation_BN = gradient_BN.contiguous(), activation_BN.contiguous()
    stripes = -(-samples // STRIPE)
    sums_SN = torch.empty(stripes, outputs)
    places = (gradient_BN.data_ptr(), activation_BN.data_ptr(), sums_SN.data_ptr())

    def work(first: int, last: int) -> None:
        found.relu_backward(*places, first, last, STRIPE, samples, outputs)

    share(work, even_cuts(stripes, max(1, min(torch.get_num_threads(), stripes))))
    return gradient_BN, sums_SN


def outer_backward(gradient_B1: Tensor, weight_1N: Tensor, activation_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The same below a layer of one output, whose input gradient is the outer product of the first two."""
    return backward(gradient_B1 * weight_1N, activation_BN)
