"""Layer normalisation in plain torch, any device, any float type: statistics and sums in float32 (float64 of float64).

Shapes: T rows, D columns; stats_2T holds the mean and 1 / standard deviation of every row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """In the type in which sums are taken."""
    return x if x.dtype == torch.float64 else x.float()


def statistics(x_TD: Tensor, eps: float) -> Tensor:
    mean_T1 = widened(x_TD).mean(1, keepdim=True)
    variance_T = (widened(x_TD) - mean_T1).square().mean(1)
    return torch.stack([mean_T1.squeeze(1), (variance_T + eps).rsqrt()])


def standard(x_TD: Tensor, stats_2T: Tensor) -> Tensor:
    """Rows of mean 0 and variance 1."""
    return (widened(x_TD) - stats_2T[0].unsqueeze(1)) * stats_2T[1].unsqueeze(1)


def forward(
    x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, *, swish: bool = False
) -> tuple[Tensor, Tensor]:
    """The normed rows, or x * sigmoid(of them), and the statistics that the backward pass wants."""
    stats_2T = statistics(x_TD, eps)
    normed_TD = standard(x_TD, stats_2T) * weight_D + bias_D
    if swish:
        normed_TD = widened(x_TD) * normed_TD.sigmoid()
    return normed_TD.to(x_TD.dtype), stats_2T


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    stats_2T: Tensor,
    *,
    swish: bool = False,
    residual_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (with the residual's added), weight and bias."""
    grad_TD, standard_TD = widened(grad_TD), standard(x_TD, stats_2T)
    direct_TD = 0.0 if residual_TD is None else widened(residual_TD)
    if swish:
        gate_TD = (standard_TD * weight_D + bias_D).sigmoid()
        direct_TD = direct_TD + grad_TD * gate_TD
        grad_TD = grad_TD * widened(x_TD) * gate_TD * (1.0 - gate_TD)
    dx_TD = through(grad_TD * weight_D, standard_TD, stats_2T) + direct_TD
    return dx_TD.to(x_TD.dtype), (grad_TD * standard_TD).sum(0), grad_TD.sum(0)


def through(grad_TD: Tensor, standard_TD: Tensor, stats_2T: Tensor) -> Tensor:
    """The gradient before the standardisation from the one after it."""
    along_T1 = (grad_TD * standard_TD).mean(1, keepdim=True)
    return (grad_TD - grad_TD.mean(1, keepdim=True) - standard_TD * along_T1) * stats_2T[1].unsqueeze(1)
