"""Two packed jagged tensors to one, row by row, and back, in plain torch.

Shapes: B rows, S and T tokens of all rows of the first and second.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_of_token(offsets_B1: Tensor, tokens: int) -> Tensor:
    rows_B = torch.arange(offsets_B1.numel() - 1, device=offsets_B1.device)
    return rows_B.repeat_interleave(offsets_B1.diff(), output_size=tokens)


def _places(a_offsets_B1: Tensor, b_offsets_B1: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    """Where the tokens of the first and of the second lie in the joined one: after all of the other before them."""
    a_places = torch.arange(first, device=a_offsets_B1.device) + b_offsets_B1[row_of_token(a_offsets_B1, first)]
    b_row_T = row_of_token(b_offsets_B1, second)
    return a_places, torch.arange(second, device=a_offsets_B1.device) + a_offsets_B1[1:][b_row_T]


def concat(a: Tensor, a_offsets_B1: Tensor, b: Tensor, b_offsets_B1: Tensor) -> Tensor:
    a_places, b_places = _places(a_offsets_B1, b_offsets_B1, a.shape[0], b.shape[0])
    out = b.new_empty(a.shape[0] + b.shape[0], *b.shape[1:])
    out[a_places] = a
    out[b_places] = b
    return out


def split(x: Tensor, a_offsets_B1: Tensor, b_offsets_B1: Tensor, first: int) -> tuple[Tensor, Tensor]:
    a_places, b_places = _places(a_offsets_B1, b_offsets_B1, first, x.shape[0] - first)
    return x[a_places], x[b_places]
