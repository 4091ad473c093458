"""The input of an STU layer, a norm and a linear map, in plain torch.

Shapes: T tokens, D model width, F outputs of the map; stats_2T holds the mean and 1 / standard deviation of each row.
"""

from __future__ import annotations

from torch import Tensor

from ..layer_norm import reference as norm
from ..layer_norm.reference import widened
from ..products import product, weight_gradient


def forward(
    x_TD: Tensor, norm_weight_D: Tensor, norm_bias_D: Tensor, weight_DF: Tensor, bias_F: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The mapped rows, in the type of x, and the statistics that the backward pass needs."""
    normed_TD, stats_2T = norm.forward(x_TD, norm_weight_D, norm_bias_D, eps)
    return product(normed_TD, weight_DF, bias_F), stats_2T


def backward(
    grad_TF: Tensor,
    x_TD: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    weight_DF: Tensor,
    stats_2T: Tensor,
    eps: float,
    *,
    residual_TD: Tensor | None = None,
    dbias_F: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x (with the residual's added), of the norm's weight and bias, and of the map's, whose bias's is
    `dbias_F` where the caller has it already."""
    normed_TD, _ = norm.forward(x_TD, norm_weight_D, norm_bias_D, eps)
    dnormed_TD = product(grad_TF, weight_DF.t())
    dx_TD, dnorm_weight_D, dnorm_bias_D = norm.backward(
        dnormed_TD, x_TD, norm_weight_D, norm_bias_D, stats_2T, residual_TD=residual_TD
    )
    dweight_DF = weight_gradient(normed_TD, grad_TF)
    dbias_F = widened(grad_TF).sum(0) if dbias_F is None else dbias_F
    return dx_TD, dnorm_weight_D, dnorm_bias_D, dweight_DF, dbias_F
