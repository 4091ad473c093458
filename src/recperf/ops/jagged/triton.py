"""Two packed jagged tensors to one, row by row, and back, on a GPU: one pass, no list of places.

Shapes: B rows, S and T tokens of all rows of the first and second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Numbers a program of four warps holds at a time."""
TURNS = 4
"""Tiles a program copies, in a row of average length."""


@triton.jit
def _copy(
    joined, a, b, a_offsets, b_offsets, D,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    a_begin, a_end = tl.load(a_offsets + row).to(tl.int64), tl.load(a_offsets + row + 1).to(tl.int64)
    b_begin, b_end = tl.load(b_offsets + row).to(tl.int64), tl.load(b_offsets + row + 1).to(tl.int64)
    first = a_end - a_begin
    tokens = first + b_end - b_begin
    columns = tl.arange(0, WIDTH)
    wide = (columns < D)[None, :]
    for begin in range(tl.program_id(1) * ROWS, tokens, ROWS * SHARES):
        token = begin + tl.arange(0, ROWS).to(tl.int64)
        from_a = (token < first)[:, None] & wide
        from_b = ((token >= first) & (token < tokens))[:, None] & wide
        in_a = a + (a_begin + token)[:, None] * D + columns[None, :]
        in_b = b + (b_begin + token - first)[:, None] * D + columns[None, :]
        in_joined = joined + (a_begin + b_begin + token)[:, None] * D + columns[None, :]
        if JOIN:
            tl.store(in_joined, tl.load(in_a, mask=from_a), mask=from_a)
            tl.store(in_joined, tl.load(in_b, mask=from_b), mask=from_b)
        else:
            tl.store(in_a, tl.load(in_joined, mask=from_a), mask=from_a)
            tl.store(in_b, tl.load(in_joined, mask=from_b), mask=from_b)


def _copied(joined: Tensor, a: Tensor, b: Tensor, a_offsets_B1: Tensor, b_offsets_B1: Tensor, *, join: bool) -> None:
    tokens, rows = joined.shape[0], a_offsets_B1.numel() - 1
    dim = joined.numel() // tokens if tokens else 0
    if not dim:
        return
    width = triton.next_power_of_2(dim)
    tall = max(1, min(1024, TILE // width))
    # How long the rows are is known to the device alone; their mean is known here.
    shares = max(1, min(1024, triton.next_power_of_2(triton.cdiv(tokens, rows * tall * TURNS))))
    _copy[(rows, shares)](
        joined, a, b, a_offsets_B1, b_offsets_B1, dim, ROWS=tall, WIDTH=width, SHARES=shares, JOIN=join, num_warps=4
    )


def concat(a: Tensor, a_offsets_B1: Tensor, b: Tensor, b_offsets_B1: Tensor) -> Tensor:
    out = torch.empty(a.shape[0] + b.shape[0], *b.shape[1:], dtype=b.dtype, device=b.device)
    _copied(out, a.contiguous(), b.contiguous(), a_offsets_B1, b_offsets_B1, join=True)
    return out


def split(x: Tensor, a_offsets_B1: Tensor, b_offsets_B1: Tensor, first: int) -> tuple[Tensor, Tensor]:
    a = torch.empty(first, *x.shape[1:], dtype=x.dtype, device=x.device)
    b = torch.empty(x.shape[0] - first, *x.shape[1:], dtype=x.dtype, device=x.device)
    _copied(x.contiguous(), a, b, a_offsets_B1, b_offsets_B1, join=False)
    return a, b
