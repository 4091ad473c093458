"""The output of an STU layer: norm, gate, concatenation, dropout, linear map, residual. `reference` (plain torch, any
device) and `triton` (a GPU).

out_TD, stats_2T = forward(attention_TE, u_TE, x_TD, norm_weight_E, norm_bias_E, weight_3ED, eps, Dropout(0.1, seed))
dattention_TE, du_TE, dnorm_weight_E, dnorm_bias_E, dweight_3ED = backward(
    grad_TD, attention_TE, u_TE, norm_weight_E, norm_bias_E, weight_3ED, stats_2T, eps, dropout, into_u=None, sum_E=None
)

u is raw: its SiLU is computed here. u and `into_u`, which its gradient is written into, may be views of a wider buffer.
The type of x is that of the result and of the matrix product, whatever the type of the weights and whatever autocast
says; gradients of parameters are float32. The gradient of x is `grad_TD` itself. The
sum of u's gradient over all tokens is written into `sum_E`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from .. import choice
from ..dropout import Dropout

__all__ = ["Dropout", "backward", "choose", "forward"]

choose = functools.partial(choice.choose, __name__)
forward: Callable[..., tuple[Tensor, Tensor]] = choice.dispatch(__name__, "forward", float64=False)
backward: Callable[..., tuple[Tensor, ...]] = choice.dispatch(__name__, "backward", float64=False)
