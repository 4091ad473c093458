"""Passes of an MLP's training: `reference` (plain torch), `native` (C, a CPU; the backward pass in place) and `triton`
(a GPU).

implementation, why = choose("auto", device)

The backward pass of a layer's ReLU with the gradient of its bias, `bias_SN.sum(0)`:
gradient_BN, bias_SN = implementation.backward(gradient_BN, activation_BN)
gradient_BN, bias_SN = implementation.outer_backward(gradient_B1, weight_1N, activation_BN)
gradient_BN, bias_SN = implementation.product_backward(gradient_BK, weight_KN, activation_BN)

The last layer, with one output, the loss of its logits, and the backward pass of both and of the ReLU below, in one
pass over the layer's input; sums over samples are stripes, still to be summed (`end.loss_S.sum()` is the mean loss):
end = implementation.forward_backward(input_BN, weight_1N, bias_1, labels_B, kind, weights)      # kind: "bce" or "mse"

The same for many tensors in one launch: torch's own kernels for lists, made for larger ones, use a part of a GPU.
body(device).copy(targets, sources)              # a target may be wider than its source, and of another type
body(device).descend(parameters, gradients, rate)
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from .. import choice
from . import reference

choose = functools.partial(choice.choose, __name__, fix="--fast.mlp plain")


def body(device: torch.device) -> ModuleType:
    """The implementation for lists of tensors; on a CPU without choosing, which would take longer than a small step."""
    return choose("auto", device)[0] if device.type == "cuda" else reference
