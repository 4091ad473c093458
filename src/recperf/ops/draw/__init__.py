"""Drawing a batch of synthetic samples: `reference` (plain torch, any device), `native` (C, CPU), `triton` (GPU).

implementation, why = choose("auto", device, plan.kind)
implementation.draw(plan, index_1, buffers)     # fills the buffers with the batch whose number `index_1` holds

C and Triton draw uniform and Zipf ids, which presets use; the reference draws the other kinds. `shared_space` draws ids
from one large space that all features share.
"""

from __future__ import annotations

from types import ModuleType

import torch

from .. import choice
from ..choice import Name
from .plan import FAST_KINDS, Buffers, Kind, Plan
from .shared_space import SharedSpacePlan

__all__ = ["Buffers", "Name", "Plan", "SharedSpacePlan", "choose"]


def choose(name: Name, device: str, kind: Kind) -> tuple[ModuleType, str]:
    """Return the implementation and the reason; an explicit request that cannot be met raises."""
    problem = None if kind in FAST_KINDS else f"it does not draw {kind} ids"
    return choice.choose(__name__, name, torch.device(device), fix="draw with reference", problem=problem)
