"""The output of an STU layer: norm, gate, concatenation, dropout, linear map, residual. `reference` (plain torch, any
device) and `triton` (a GPU).

out_TD, stats_2T = forward(attention_TE, u_TE, x_TD, norm_weight_E, norm_bias_E, weight_3ED, eps, Dropout(0.1, seed))
dattention_TE, du_TE, dnorm_weight_E, dnorm_bias_E, dweight_3ED = backward(
    grad_TD, attention_TE, u_TE, norm_weight_E, norm_bias_E, weight_3ED, stats_2T, eps, dropout, into_u=None
)

u is raw: its SiLU is computed here. u and `into_u`, which its gradient is written into, may be views of a wider buffer.
The type of x is that of the result and of the matrix product, whatever the type of the weights and whatever autocast
says; gradients of parameters are float32. The gradient of x is `grad_TD` itself.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from .. import choice
from ..choice import Name
from ..dropout import Dropout

__all__ = ["Dropout", "Name", "backward", "choose", "forward"]

choose = functools.partial(choice.choose, __name__)


def forward(
    attention_TE: Tensor,
    u_TE: Tensor,
    x_TD: Tensor,
    norm_weight_E: Tensor,
    norm_bias_E: Tensor,
    weight_3ED: Tensor,
    eps: float,
    dropout: Dropout,
    *,
    impl: Name = "auto",
) -> tuple[Tensor, Tensor]:
    """The layer's output and the statistics that the backward pass needs."""
    with torch.autocast(x_TD.device.type, enabled=False):
        result: tuple[Tensor, Tensor] = _body(impl, x_TD).forward(
            attention_TE, u_TE, x_TD, norm_weight_E, norm_bias_E, weight_3ED, eps, dropout
        )
    return result


def backward(
    grad_TD: Tensor,
    attention_TE: Tensor,
    u_TE: Tensor,
    norm_weight_E: Tensor,
    norm_bias_E: Tensor,
    weight_3ED: Tensor,
    stats_2T: Tensor,
    eps: float,
    dropout: Dropout,
    *,
    into_u: Tensor | None = None,
    impl: Name = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the attention, of u, of the norm's weight and bias, and of the map."""
    with torch.autocast(grad_TD.device.type, enabled=False):
        result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _body(impl, grad_TD).backward(
            grad_TD, attention_TE, u_TE, norm_weight_E, norm_bias_E, weight_3ED, stats_2T, eps, dropout, into_u=into_u
        )
    return result


def _body(impl: Name, x_TD: Tensor) -> ModuleType:
    # The kernels compute in float32, which is not enough for float64.
    return choose("reference" if impl == "auto" and x_TD.dtype == torch.float64 else impl, x_TD.device)[0]
