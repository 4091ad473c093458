"""The last layer of an MLP, with one output, the loss of its logits, and the backward pass of both and of the ReLU
below: `reference` (plain torch) and `triton` (a GPU), in one pass over the layer's input.

implementation, why = choose("auto", device)
end = implementation.forward_backward(input_BN, weight_1N, bias_1, labels_B, kind, weights)      # kind: "bce" or "mse"

Sums over samples come as stripes of samples, which are still to be summed: `end.loss_S.sum()` is the mean loss.
"""

from __future__ import annotations

import functools

from .. import choice

choose = functools.partial(choice.choose, __name__, fix="--fast.mlp plain")
