"""A whole training step of a small DLRM with AdamW, in place: `reference` (plain torch and autograd, any device) and
`native` (C, one thread of a CPU, one call per step).

implementation, why = choose("auto", device)
step = implementation.Step(network, samples, order_N)
loss, norm = step(0, 256, rate=..., norm=True)          # the first 256 samples of the order; the norm of the gradient
"""

from __future__ import annotations

import functools

from .. import choice
from ..choice import DLRM_STEP, Name
from .reference import MOST_LAYERS, Network, TrainingRows

__all__ = ["DLRM_STEP", "MOST_LAYERS", "Name", "Network", "TrainingRows", "choose"]

choose = functools.partial(choice.choose, __name__, fix="--train.native off", moves=True)
