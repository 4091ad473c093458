"""Counts which items come soon after others in sequences: `reference` (numpy, anywhere) and `native` (C threads).

implementation, why = choose("auto")
rows_W, columns_W, sums_W = implementation.count(events, begins_R, ends_R, weights_D, pairs=1 << 20)
sums_BI = add_rows(offsets_I1, columns_W, values_W, history_BL, weights_L, items)     # on any device

Shapes: E events, P events that others follow, R rows, D distances, W entries.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from .. import choice
from . import reference
from .reference import Followed, PairCounts

Name = Literal["auto", "reference", "native"]

__all__ = ["Followed", "Name", "PairCounts", "add_rows", "choose"]


def choose(name: Name = "auto") -> tuple[ModuleType, str]:
    """The implementation and the reason for it; both give the same bits."""
    return choice.choose(__name__, name, torch.device("cpu"), moves=True)


def add_rows(
    offsets_I1: Tensor, columns_W: Tensor, values_W: Tensor, history_BL: Tensor, weights_L: Tensor, items: int
) -> Tensor:
    """The sums of the counts of the items of each history, times the weights of their places; 0 is no item."""
    body = choose()[0] if history_BL.is_cpu else reference
    sums_BI: Tensor = body.add_rows(offsets_I1, columns_W, values_W, history_BL, weights_L, items)
    return sums_BI
