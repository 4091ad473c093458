"""The backward pass of a linear layer's ReLU with the gradient of its bias: `reference` (plain torch), `native`
(C, a CPU, in place) and `triton` (a GPU).

implementation, why = choose("auto", device)
gradient_BN, bias_SN = implementation.backward(gradient_BN, activation_BN)      # bias_SN.sum(0) is the bias gradient
gradient_BN, bias_SN = implementation.outer_backward(gradient_B1, weight_1N, activation_BN)
gradient_BN, bias_SN = implementation.product_backward(gradient_BK, weight_KN, activation_BN)
"""

from __future__ import annotations

import functools

from .. import choice

choose = functools.partial(choice.choose, __name__, fix="--fast.mlp plain")
