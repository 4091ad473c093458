"""The input of an STU layer: a layer norm and one linear map to u, v, q and k. `reference` (plain torch, any device)
and `triton` (a GPU).

uvqk_TF, stats_2T = forward(x_TD, norm_weight_D, norm_bias_D, weight_DF, bias_F, eps)
dx_TD, dnorm_weight_D, dnorm_bias_D, dweight_DF, dbias_F = backward(
    grad_TF, x_TD, norm_weight_D, norm_bias_D, weight_DF, stats_2T, eps, residual_TD=None
)

The type of x is that of the result and of the matrix product, whatever the type of the weights and whatever autocast
says; gradients of parameters are float32. `residual_TD` is added to the gradient of x.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from .. import choice
from ..choice import Name

__all__ = ["Name", "backward", "choose", "forward"]

choose = functools.partial(choice.choose, __name__)


def forward(
    x_TD: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    weight_DF: Tensor,
    bias_F: Tensor,
    eps: float,
    *,
    impl: Name = "auto",
) -> tuple[Tensor, Tensor]:
    """The mapped rows and the statistics that the backward pass needs."""
    with torch.autocast(x_TD.device.type, enabled=False):
        result: tuple[Tensor, Tensor] = _body(impl, x_TD).forward(
            x_TD, norm_weight_D, norm_bias_D, weight_DF, bias_F, eps
        )
    return result


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
    impl: Name = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of the norm's weight and bias, and of the map's."""
    with torch.autocast(x_TD.device.type, enabled=False):
        result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _body(impl, x_TD).backward(
            grad_TF, x_TD, norm_weight_D, norm_bias_D, weight_DF, stats_2T, eps, residual_TD=residual_TD
        )
    return result


def _body(impl: Name, x_TD: Tensor) -> ModuleType:
    # The kernels compute in float32, which is not enough for float64.
    return choose("reference" if impl == "auto" and x_TD.dtype == torch.float64 else impl, x_TD.device)[0]
