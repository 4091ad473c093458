"""The output of an STU layer: norm, gate, concatenation, dropout, linear map, residual. `reference` (plain torch, any
device) and `triton` (a GPU) compute all but the matrix products.

out_TD, stats_2T = forward(attention_TE, u_TE, x_TD, norm_weight_E, norm_bias_E, weight_3ED, eps, Dropout(0.1, seed))
dattention_TE, du_TE, dnorm_weight_E, dnorm_bias_E, dweight_3ED = backward(
    grad_TD, attention_TE, u_TE, norm_weight_E, norm_bias_E, weight_3ED, stats_2T, eps, dropout, into_u=None, sum_E=None
)

u is raw: its SiLU is computed here. u and `into_u`, which its gradient is written into, may be views of a wider buffer.
The type of x is that of the result and of the matrix product, whatever the type of the weights and whatever autocast
says; gradients of parameters are float32. The gradient of x is `grad_TD` itself. The
sum of u's gradient over all tokens is written into `sum_E`.

Shapes: T tokens, D model width, E attention width (of all heads), 3E the concatenation; stats_2T holds the mean and
1 / standard deviation of each row of the attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from .. import choice
from ..dropout import Dropout
from ..products import product, weight_gradient

__all__ = ["Dropout", "backward", "choose", "forward"]

choose = functools.partial(choice.choose, __name__)


def _forward(
    body: ModuleType,
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
    z_T3E, stats_2T = body.gated(attention_TE, u_TE, norm_weight_E, norm_bias_E, eps, dropout)
    return product(z_T3E.to(x_TD.dtype), weight_3ED, x_TD), stats_2T


def _backward(
    body: ModuleType,
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
) -> tuple[Tensor, ...]:
    """Gradients of the attention, of u, of the norm's weight and bias, of the map."""
    rows_T3E = product(grad_TD, weight_3ED.t())
    gradients = body.gated_backward(
        rows_T3E, attention_TE, u_TE, norm_weight_E, norm_bias_E, stats_2T, eps, dropout, into_u=into_u, sum_E=sum_E
    )
    return *gradients, weight_gradient(rows_T3E, grad_TD)


forward: Callable[..., tuple[Tensor, Tensor]] = choice.dispatch(__name__, _forward, float64=False)
backward: Callable[..., tuple[Tensor, ...]] = choice.dispatch(__name__, _backward, float64=False)
