"""Counts which items come soon after others in sequences: `reference` (numpy, anywhere) and `native` (C threads).

implementation, why = choose("auto")
rows_W, columns_W, sums_W = implementation.count(events, begins_R, ends_R, weights_D, pairs=1 << 20)

Shapes: E events, P events that others follow, R rows, D distances, W entries.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from .. import choice
from .reference import Followed, PairCounts

Name = Literal["auto", "reference", "native"]

__all__ = ["Followed", "Name", "PairCounts", "choose"]


def choose(name: Name = "auto") -> tuple[ModuleType, str]:
    """The implementation and the reason for it; both give the same bits."""
    return choice.choose(__name__, name, torch.device("cpu"), moves=True)
