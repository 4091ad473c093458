"""Drawing a batch of made-up samples: `reference` (plain torch, any device), `native` (C, a CPU), `triton` (a GPU).

implementation, why = choose("auto", device)
implementation.draw(plan, index, buffers)     # fills the buffers for the window whose number `index` holds
"""

from __future__ import annotations

from types import ModuleType

import torch

from .. import choice
from ..choice import Name
from .plan import Buffers, Plan

__all__ = ["Buffers", "Name", "Plan", "choose"]


def choose(name: Name, device: str) -> tuple[ModuleType, str]:
    """The implementation and why; an explicit wish that cannot be met is an error."""
    place = torch.device(device)
    return choice.choose(__name__, name, place, what="draw", subject="the batches", fix="draw with reference")
