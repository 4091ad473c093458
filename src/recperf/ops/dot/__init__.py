"""The dot interaction: `reference` (plain torch, any device), `native` (C, a CPU) and `triton` (a GPU, one kernel
per direction).

implementation, why = choose("auto", device)
met_BW, saved = implementation.forward(dense_BD, sparse_FBD, diagonal=False)
dense_BD, sparse_FBD = implementation.backward(saved, gradient_BW, diagonal=False)      # gradients
"""

from __future__ import annotations

import functools

from .. import choice

choose = functools.partial(choice.choose, __name__, fix="--fast.interaction plain")
