"""Picks the events of a sample's history and reads their columns: `reference` (numpy, anywhere) and `native` (C).

implementation, why = choose("auto")
picked = implementation.pick(events, begin_B, positions_B, rule)     # among the events begin <= position < anchor
implementation.fill(events, begin_B, picked, room)
implementation.crosses(columns_KB, crosses, out_CB)                  # rows of cross features: columns hashed together
lengths_B = implementation.lengths(events, begin_B, positions_B, rule)    # how many `pick` picks, without picking
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from .. import choice
from .reference import Crosses, Events, HistoryArrays, Picked, Rule

Name = Literal["auto", "reference", "native"]

__all__ = ["Crosses", "Events", "HistoryArrays", "Name", "Picked", "Rule", "choose"]


def choose(name: Name) -> tuple[ModuleType, str]:
    """The implementation and the reason for it; an explicit request that cannot be met is an error."""
    return choice.choose(__name__, name, torch.device("cpu"))
