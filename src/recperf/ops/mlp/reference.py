"""Passes of an MLP in plain torch: of a ReLU and the bias before it, of the last layer with its loss, and copies and
SGD of many tensors by torch's functions for lists.

Shapes: B samples, N outputs of a layer (inputs of the last), K of the layer above it, S = 1 stripe of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


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


WIDEST = 4096
"""Inputs of the layer: a program holds some rows of them."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Logits, and the loss and gradients of a mean over samples."""

    logits_B: Tensor
    loss_S: Tensor
    to_input_BN: Tensor
    """The gradient before the ReLU that made the input, in the input's type."""
    to_input_bias_SN: Tensor
    """Its sums over samples: the gradient of the bias below."""
    to_weight_SN: Tensor
    to_bias_S: Tensor

    def scaled(self, scale: float) -> End:
        """The gradients times a factor."""
        return replace(
            self,
            to_input_BN=self.to_input_BN * scale,
            to_input_bias_SN=self.to_input_bias_SN * scale,
            to_weight_SN=self.to_weight_SN * scale,
            to_bias_S=self.to_bias_S * scale,
        )


def forward_backward(
    input_BN: Tensor,
    weight_1N: Tensor,
    bias_1: Tensor,
    labels_B: Tensor,
    kind: str,
    weights: tuple[float, float] = (1.0, 1.0),
) -> End:
    """`kind` is bce or mse; `weights` are those of a negative and of a positive sample."""
    wide_BN = input_BN.float()
    logits_B = (wide_BN @ weight_1N.float().t() + bias_1.float()).squeeze(1)
    probability_B = logits_B.sigmoid()
    if kind == "mse":
        value_B = (probability_B - labels_B).square()
        slope_B = 2 * (probability_B - labels_B) * probability_B * (1 - probability_B)
    else:
        value_B = F.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
        slope_B = probability_B - labels_B
    factor_B = torch.where(labels_B > 0.5, weights[1], weights[0]) / max(1, labels_B.shape[0])
    slope_B = slope_B * factor_B
    gradient_BN = torch.where(input_BN > 0, slope_B[:, None] * weight_1N.float(), 0.0).to(input_BN.dtype)
    return End(
        logits_B=logits_B,
        loss_S=(value_B * factor_B).sum().view(1),
        to_input_BN=gradient_BN,
        to_input_bias_SN=gradient_BN.sum(0, dtype=torch.float32, keepdim=True),
        to_weight_SN=slope_B[None] @ wide_BN,
        to_bias_S=slope_B.sum().view(1),
    )


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, or into the first columns of a wider one, which keeps the others."""
    even = [(target, source) for target, source in zip(targets, sources) if target.shape == source.shape]
    for target, source in zip(targets, sources):
        if target.shape != source.shape:
            # Apart from the others: among them it would prevent copying all by one kernel.
            target[:, : source.shape[1]].copy_(source)
    if even:
        torch._foreach_copy_([target for target, _ in even], [source for _, source in even])


def descend(parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: float | Tensor) -> None:
    """Subtract each gradient times the rate."""
    torch._fused_sgd_(
        list(parameters),
        list(gradients),
        [],
        lr=rate,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
