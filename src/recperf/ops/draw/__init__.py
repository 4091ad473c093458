"""Drawing a batch of made-up samples: `reference` (plain torch, any device) and faster ones held against it.

implementation, why = choose("auto", device)
implementation.draw(plan, index, batch)     # fills the batch for the window whose number `index` holds
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

from . import reference
from .plan import Plan

__all__ = ["Name", "Plan", "choose"]

Name = Literal["auto", "reference"]


def choose(name: Name, device: str) -> tuple[ModuleType, str]:
    """The implementation and why."""
    return reference, f"reference: {'asked for' if name == 'reference' else 'the only one so far'}"
