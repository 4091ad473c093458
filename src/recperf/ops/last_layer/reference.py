"""The last layer, its loss and their backward pass in plain torch.

Shapes: B samples, N inputs of the layer, S = 1 stripe of samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

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
