"""What an STU layer's output does around its matrix product, in plain torch.

Shapes: as in the package.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dropout import Dropout, dropped
from ..layer_norm import reference as norm
from ..layer_norm.reference import widened


def gated(
    attention_TE: Tensor, u_TE: Tensor, norm_weight_E: Tensor, norm_bias_E: Tensor, eps: float, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """What the map is applied to: [silu(u) ; attention ; silu(u) * norm(attention)] after dropout; and statistics."""
    gate_TE, wide_TE = F.silu(widened(u_TE)), widened(attention_TE)
    normed_TE, stats_2T = norm.forward(wide_TE, norm_weight_E, norm_bias_E, eps)
    z_T3E = torch.cat([gate_TE, wide_TE, gate_TE * normed_TE], 1)
    return dropped(z_T3E, dropout).to(attention_TE.dtype), stats_2T


def gated_backward(
    dz_T3E: Tensor, attention_TE: Tensor, u_TE: Tensor, norm_weight_E: Tensor, norm_bias_E: Tensor, stats_2T: Tensor,
    eps: float, dropout: Dropout, *, into_u: Tensor | None, sum_E: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the attention, of u, and of the norm's weight and bias; what the map is applied to overwrites
    `dz_T3E`."""
    dgate_TE, dattention_TE, dy_TE = dropped(widened(dz_T3E), dropout).chunk(3, 1)
    raw_TE, wide_TE = widened(u_TE), widened(attention_TE)
    normed_TE, _ = norm.forward(wide_TE, norm_weight_E, norm_bias_E, eps)
    du_TE = torch.ops.aten.silu_backward(dgate_TE + dy_TE * normed_TE, raw_TE).to(u_TE.dtype)
    dattention_TE, *dnorm = norm.backward(
        dy_TE * F.silu(raw_TE), wide_TE, norm_weight_E, norm_bias_E, stats_2T, residual_TD=dattention_TE
    )
    dz_T3E.copy_(gated(attention_TE, u_TE, norm_weight_E, norm_bias_E, eps, dropout)[0])
    if into_u is not None:
        du_TE = into_u.copy_(du_TE)
    if sum_E is not None:
        torch.sum(du_TE, 0, dtype=sum_E.dtype, out=sum_E)
    return dattention_TE.to(attention_TE.dtype), du_TE, *dnorm
