"""Layer normalisation in plain torch, any device, any float type: statistics and sums in float32 (float64 of float64).

Shapes: T rows, D columns; stats_2T holds the mean and 1 / standard deviation of every row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """In the type of the sums: float32, or float64 of float64."""
    return x if x.dtype == torch.float64 else x.float()


def forward(
    x_TD: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float, *, swish: bool = False,
    kind: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The normed rows, or x * sigmoid(of them), and the statistics that the backward pass needs."""
    wide_TD, (weight_D, bias_D) = widened(x_TD), _alike(x_TD, weight_D, bias_D)
    normed_TD, mean_T1, spread_T1 = torch.native_layer_norm(wide_TD, wide_TD.shape[1:], weight_D, bias_D, eps)
    if swish:
        normed_TD = normed_TD.sigmoid_().mul_(wide_TD)
    return normed_TD.to(kind or x_TD.dtype), torch.stack([mean_T1.view(-1), spread_T1.view(-1)])


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    stats_2T: Tensor,
    *,
    swish: bool = False,
    residual_TD: Tensor | None = None,
    again: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x (with the residual's added), and of weight and bias if there are any. With `again`, which is eps,
    the normed rows overwrite the gradient."""
    place_TD, wide_TD, (weight_D, bias_D) = grad_TD, widened(x_TD), _alike(x_TD, weight_D, bias_D)
    grad_TD = widened(grad_TD)
    mean_T1, spread_T1 = stats_2T.unsqueeze(2)
    direct_TD = None if residual_TD is None else widened(residual_TD)
    if swish:
        standard_TD = (wide_TD - mean_T1).mul_(spread_T1)
        if weight_D is not None and bias_D is not None:
            standard_TD = torch.addcmul(bias_D, standard_TD, weight_D)
        gate_TD = standard_TD.sigmoid_()
        direct_TD = grad_TD * gate_TD if direct_TD is None else torch.addcmul(direct_TD, grad_TD, gate_TD)
        grad_TD = torch.ops.aten.sigmoid_backward(grad_TD * wide_TD, gate_TD)
    dx_TD, dweight_D, dbias_D = torch.ops.aten.native_layer_norm_backward(
        grad_TD.contiguous(), wide_TD, wide_TD.shape[1:], mean_T1, spread_T1, weight_D, bias_D,
        (True, weight_D is not None, bias_D is not None),
    )  # fmt: skip
    dx_TD = dx_TD if direct_TD is None else dx_TD + direct_TD
    if again is not None:
        place_TD.copy_(forward(x_TD, weight_D, bias_D, again, swish=swish)[0])
    return dx_TD.to(x_TD.dtype), dweight_D, dbias_D


def column_sums(x_TD: Tensor) -> Tensor:
    """The sum of every column."""
    return widened(x_TD).sum(0)


def _alike(x_TD: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """Parameters in the type of the sums, which torch's norm needs."""
    kind = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    return [None if parameter is None else parameter.to(kind) for parameter in parameters]
