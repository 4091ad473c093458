"""The distinct ids of a batch, and the way the batch is composed of them.

Shapes: N ids, U distinct ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Unique:
    """`values_U[inverse_N]` are the ids; those equal to the u-th are at `order_N[starts_U1[u]:starts_U1[u + 1]]`."""

    values_U: Tensor
    """Ascending."""
    inverse_N: Tensor
    order_N: Tensor
    """Places of the ids, ordered by value, ascending within a value."""
    starts_U1: Tensor


def unique(ids_N: Tensor) -> Unique:
    """The distinct ids, by sorting. Reads their number on the host, which waits for the device."""
    sorted_N, order_N = torch.sort(ids_N, stable=True)
    fresh_N = torch.ones_like(sorted_N, dtype=torch.bool)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=fresh_N[1:])
    firsts_U = fresh_N.nonzero().squeeze(1)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = fresh_N.cumsum(0) - 1
    end_1 = torch.full((1,), ids_N.numel(), dtype=firsts_U.dtype, device=ids_N.device)
    return Unique(
        values_U=sorted_N[firsts_U], inverse_N=inverse_N, order_N=order_N, starts_U1=torch.cat([firsts_U, end_1])
    )
