"""The dot interaction: `reference` (plain torch, any device), `native` (C, a CPU) and `triton` (a GPU, one kernel
each way).

implementation, why = choose("auto", device)
met_BW, saved = implementation.forward(dense_BD, sparse_FBD, diagonal=False)
dense_BD, sparse_FBD = implementation.backward(saved, gradient_BW, diagonal=False)      # gradients
"""

from __future__ import annotations

from types import ModuleType

import torch

from .. import choice
from ..choice import Name

__all__ = ["Name", "choose"]


def choose(name: Name, device: torch.device) -> tuple[ModuleType, str]:
    """The implementation and why; an explicit wish that cannot be met is an error."""
    return choice.choose(
        __name__, name, device, what="interaction", subject="the vectors", fix="--fast.interaction plain"
    )
