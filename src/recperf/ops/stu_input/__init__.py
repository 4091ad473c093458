"""The input of an STU layer: a layer norm and one linear map to u, v, q and k. `reference` (plain torch, any device)
and `triton` (a GPU).

uvqk_TF, stats_2T = forward(x_TD, norm_weight_D, norm_bias_D, weight_DF, bias_F, eps)
dx_TD, dnorm_weight_D, dnorm_bias_D, dweight_DF, dbias_F = backward(
    grad_TF, x_TD, norm_weight_D, norm_bias_D, weight_DF, stats_2T, eps, residual_TD=None, dbias_F=None
)

The type of x is that of the result and of the matrix product, whatever the type of the weights and whatever autocast
says; gradients of parameters are float32. `residual_TD` is added to the gradient of x;
`dbias_F` is taken where the caller has it already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from .. import choice

choose = functools.partial(choice.choose, __name__)
forward: Callable[..., tuple[Tensor, Tensor]] = choice.dispatch(__name__, "forward", float64=False)
backward: Callable[..., tuple[Tensor, ...]] = choice.dispatch(__name__, "backward", float64=False)
