"""The input of an STU layer: a layer norm and one linear map to u, v, q and k, by `reference` or `triton` of layer_norm
and torch's matrix products.

uvqk_TF, stats_2T = forward(x_TD, norm_weight_D, norm_bias_D, weight_DF, bias_F, eps)
dx_TD, dnorm_weight_D, dnorm_bias_D, dweight_DF, dbias_F = backward(
    grad_TF, x_TD, norm_weight_D, norm_bias_D, weight_DF, stats_2T, eps, residual_TD=None, dbias_F=None
)

The type of x is that of the result and of the matrix product, whatever the type of the weights and whatever autocast
says; gradients of parameters are float32.

Shapes: T tokens, D model width, F outputs of the map; stats_2T holds the mean and 1 / standard deviation of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from . import choice, layer_norm
from .products import product, weight_gradient


def _forward(
    norm: ModuleType,
    x_TD: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    weight_DF: Tensor,
    bias_F: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The mapped rows, in the type of x, and the statistics that the backward pass needs."""
    normed_TD, stats_2T = norm.forward(x_TD, norm_weight_D, norm_bias_D, eps)
    return product(normed_TD, weight_DF, bias_F), stats_2T


def _backward(
    norm: ModuleType,
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
) -> tuple[Tensor, ...]:
    """Gradients of x (with the residual's added), of the norm's weight and bias, and of the map's.

    That of the map's bias is `dbias_F` where the caller has it already: it saves reading the gradient once more.
    """
    grad_TF = grad_TF.to(x_TD.dtype)
    # The norm reads x anyway: it also writes the normed rows again, over the gradient that it has just used, for the
    # weight's gradient. So nothing else is saved from the forward pass.
    rows_TD = product(grad_TF, weight_DF.t())
    dx_TD, dnorm_weight_D, dnorm_bias_D = norm.backward(
        rows_TD, x_TD, norm_weight_D, norm_bias_D, stats_2T, residual_TD=residual_TD, again=eps
    )
    dbias_F = norm.column_sums(grad_TF) if dbias_F is None else dbias_F
    return dx_TD, dnorm_weight_D, dnorm_bias_D, weight_gradient(rows_TD, grad_TF), dbias_F


forward: Callable[..., tuple[Tensor, Tensor]] = choice.dispatch(layer_norm.__name__, _forward, float64=False)
backward: Callable[..., tuple[Tensor, ...]] = choice.dispatch(layer_norm.__name__, _backward, float64=False)
