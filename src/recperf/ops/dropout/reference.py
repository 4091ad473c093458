"""Dropout in plain torch, on any device.

Shapes: T rows, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..draw.plan import MULTIPLIERS
from ..draw.reference import mix
from .rule import COLUMN_STEP, Dropout, signed


def keep_mask(dropout: Dropout, rows: int, columns: int, device: torch.device | str) -> Tensor:
    """Which values stay, rows x columns."""
    if dropout.rate == 0.0:
        return torch.ones(rows, columns, dtype=torch.bool, device=device)
    first, second = map(signed, dropout.keys)
    numbers_T = torch.arange(rows, device=device) if dropout.rows_T is None else dropout.rows_T
    a_T = mix(mix(numbers_T.to(torch.int32) ^ first) + second)
    b_T = mix(a_T ^ second)
    steps_D = torch.arange(columns, dtype=torch.int32, device=device) * signed(COLUMN_STEP)
    words_TD = steps_D + a_T.unsqueeze(1)
    words_TD ^= ((words_TD >> 16) & 0xFFFF) ^ b_T.unsqueeze(1)
    words_TD *= signed(MULTIPLIERS[0])
    words_TD ^= (words_TD >> 15) & 0x1FFFF
    words_TD *= signed(MULTIPLIERS[1])
    # With the top bit turned, signed words compare as the unsigned ones do.
    return (words_TD ^ -(1 << 31)) >= dropout.threshold - (1 << 31)


def factors(dropout: Dropout, like_TD: Tensor) -> Tensor:
    """The factor of each value: 0, or 1 / (1 - rate)."""
    kept_TD = keep_mask(dropout, like_TD.shape[0], like_TD.shape[1], like_TD.device)
    return kept_TD.to(like_TD.dtype) * dropout.scale


def forward(x_TD: Tensor, dropout: Dropout) -> Tensor:
    """The values that stay, scaled, and 0 elsewhere; the same function is the backward pass."""
    if dropout.rate == 0.0:
        return x_TD
    wide_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
    return (wide_TD * factors(dropout, wide_TD)).to(x_TD.dtype)
