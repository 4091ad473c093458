"""The output of an STU layer in plain torch: norm, gate, concatenation, dropout, linear map, residual.

Shapes: T tokens, D model width, E attention width (of all heads), 3E the concatenation; stats_2T holds the mean and
1 / standard deviation of each row of the attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dropout import Dropout, dropped
from ..layer_norm import reference as norm
from ..layer_norm.reference import widened
from ..products import product, weight_gradient


def forward(
    attention_TE: Tensor,
    u_TE: Tensor,
    x_TD: Tensor,
    norm_weight_E: Tensor,
    norm_bias_E: Tensor,
    weight_3ED: Tensor,
    eps: float,
    dropout: Dropout,
) -> tuple[Tensor, Tensor]:
    """The residual plus the map of what was gated, in the type of x, and the statistics for the backward pass."""
    z_T3E, stats_2T = gated(attention_TE, u_TE, norm_weight_E, norm_bias_E, eps, dropout)
    return product(z_T3E.to(x_TD.dtype), weight_3ED, x_TD), stats_2T


def gated(
    attention_TE: Tensor, u_TE: Tensor, norm_weight_E: Tensor, norm_bias_E: Tensor, eps: float, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """What the map is applied to: [silu(u) ; attention ; silu(u) * norm(attention)] after dropout; and statistics."""
    gate_TE, wide_TE = F.silu(widened(u_TE)), widened(attention_TE)
    normed_TE, stats_2T = norm.forward(wide_TE, norm_weight_E, norm_bias_E, eps)
    z_T3E = torch.cat([gate_TE, wide_TE, gate_TE * normed_TE], 1)
    return dropped(z_T3E, dropout).to(attention_TE.dtype), stats_2T


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
    sum_E: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the attention, of u (written into `into_u` if set), of the norm's weight and bias, of the map.

    That of x is `grad_TD` itself. The sum of u's gradient over all tokens is written into `sum_E` if set.
    """
    z_T3E, _ = gated(attention_TE, u_TE, norm_weight_E, norm_bias_E, eps, dropout)
    dweight_3ED = weight_gradient(z_T3E.to(grad_TD.dtype), grad_TD)
    dz_T3E = widened(product(grad_TD, weight_3ED.t()))
    dgate_TE, dattention_TE, dy_TE = dropped(dz_T3E, dropout).chunk(3, 1)
    raw_TE, wide_TE = widened(u_TE), widened(attention_TE)
    normed_TE, _ = norm.forward(wide_TE, norm_weight_E, norm_bias_E, eps)
    du_TE = torch.ops.aten.silu_backward(dgate_TE + dy_TE * normed_TE, raw_TE).to(u_TE.dtype)
    dattention_TE, *dnorm = norm.backward(
        dy_TE * F.silu(raw_TE), wide_TE, norm_weight_E, norm_bias_E, stats_2T, residual_TD=dattention_TE
    )
    if into_u is not None:
        du_TE = into_u.copy_(du_TE)
    if sum_E is not None:
        torch.sum(du_TE, 0, dtype=sum_E.dtype, out=sum_E)
    return dattention_TE.to(attention_TE.dtype), du_TE, dnorm[0], dnorm[1], dweight_3ED
