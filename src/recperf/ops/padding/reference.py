"""Packed and padded heads in plain torch, and the rotation by positions. Shapes: see the package."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from . import Sequences

BASE = 10_000.0
"""The slowest point turns by about one radian in so many positions."""


def rotated(x_LA: Tensor, positions_L: Tensor | None = None, *, longest: int = 0, back: bool = False) -> Tensor:
    """The last dimension turned by the positions of the one before it, all below `longest`, or of 0, 1, 2 and so on if
    they are not given; or turned back."""
    half = x_LA.shape[-1] // 2
    points = torch.arange(half, device=x_LA.device, dtype=torch.float64)
    numbers_L = torch.arange(longest or x_LA.shape[-2], device=x_LA.device, dtype=torch.float64)
    angles_LA = numbers_L[:, None] * torch.exp2(points * (-math.log2(BASE) / max(1, half)))
    # From float64: torch's vectors and single numbers of float32 may differ in the last bit, and with it ranks.
    cos, sin = angles_LA.cos().float(), angles_LA.sin().float()
    if positions_L is not None:
        cos, sin = cos[positions_L], sin[positions_L]
    sin = -sin if back else sin
    first, second, rest = torch.split(x_LA, [half, half, x_LA.shape[-1] - 2 * half], -1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)
    return turned.to(x_LA.dtype)


def pad(packed_TGA: Tensor, sequences: Sequences, turned: int) -> Tensor:
    """B x L x G x A; the first `turned` heads are rotated."""
    if turned:
        ahead_GTA = rotated(packed_TGA[:, :turned].transpose(0, 1), sequences.positions_T, longest=sequences.longest)
        packed_TGA = torch.cat([ahead_GTA.transpose(0, 1), packed_TGA[:, turned:]], 1)
    shape = (len(sequences.offsets_B1) - 1, sequences.longest, *packed_TGA.shape[1:])
    return packed_TGA.new_zeros(shape).index_put_((sequences.rows_T, sequences.positions_T), packed_TGA)


def pack(padded_BLHA: Tensor, sequences: Sequences, into_THA: Tensor, *, back: bool) -> None:
    """Write the positions of all sequences, rotated back or as they are."""
    packed_THA = padded_BLHA[sequences.rows_T, sequences.positions_T]
    if back:
        packed_THA = rotated(
            packed_THA.transpose(0, 1), sequences.positions_T, longest=sequences.longest, back=True
        ).transpose(0, 1)
    into_THA.copy_(packed_THA)
