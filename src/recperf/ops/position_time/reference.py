"""Tokens scaled, with a learned vector for where in its row a token is and one for how long ago, in plain torch.

A token counts its position from the end of its row, after as many places as there are tokens of context, which come
first and have a place each. Its age against the last token of the row is told in square roots of minutes.

Shapes: B rows, T tokens of all rows, D width, P positions, Q ages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..jagged.reference import row_of_token
from ..lookup.reference import segment_sum

SHORTEST, UNIT = 1e-6, 60.0
"""Seconds: what counts for no age at all, and what an age is counted in before the root."""


def positions_of(offsets_B1: Tensor, tokens: int, *, positions: int, context: int) -> Tensor:
    """The row of the position table that every token takes."""
    row_T = row_of_token(offsets_B1, tokens)
    token_T = torch.arange(tokens, device=offsets_B1.device)
    from_start_T, from_end_T = token_T - offsets_B1[row_T], offsets_B1[1:][row_T] - 1 - token_T
    return torch.where(from_start_T < context, from_start_T, from_end_T + context).clamp(max=positions - 1)


def ages_of(offsets_B1: Tensor, times_T: Tensor, ages: int) -> Tensor:
    """The row of the time table that every token takes."""
    last_T = offsets_B1[1:][row_of_token(offsets_B1, times_T.numel())] - 1
    seconds_T = (times_T[last_T] - times_T).to(torch.float32).clamp(min=SHORTEST)
    # Divided by a tensor: a CUDA device multiplies by the inverse of a plain number, which rounds otherwise. The root
    # is taken in float64 and rounded once: some CPUs' own float32 root is off by a last bit, which moves a bucket.
    root_T = (seconds_T / torch.full((1,), UNIT, device=times_T.device)).double().sqrt().float()
    return root_T.long().clamp(max=ages - 1)


def buckets(offsets_B1: Tensor, times_T: Tensor, *, positions: int, ages: int, context: int) -> tuple[Tensor, Tensor]:
    """The rows of both tables that every token takes."""
    position_T = positions_of(offsets_B1, times_T.numel(), positions=positions, context=context)
    return position_T, ages_of(offsets_B1, times_T, ages)


def forward(
    x_TD: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor,
    position_weight_PD: Tensor,
    time_weight_QD: Tensor,
    *,
    scale: float,
    context: int,
    longest: int,
) -> Tensor:
    position_T, age_T = buckets(
        offsets_B1, times_T, positions=position_weight_PD.shape[0], ages=time_weight_QD.shape[0], context=context
    )
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    out_TD = x_TD.to(wide) * scale + position_weight_PD[position_T].to(wide) + time_weight_QD[age_T].to(wide)
    return out_TD.to(x_TD.dtype)


def backward(
    grad_TD: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor,
    *,
    positions: int,
    ages: int,
    scale: float,
    context: int,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    position_T, age_T = buckets(offsets_B1, times_T, positions=positions, ages=ages, context=context)
    return grad_TD * scale, bucket_sums(grad_TD, position_T, positions), bucket_sums(grad_TD, age_T, ages)


def grouped(bucket_T: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The tokens in order of their buckets, and where each bucket begins in it."""
    sorted_T, order_T = torch.sort(bucket_T, stable=True)
    edges = torch.arange(count + 1, device=bucket_T.device, dtype=bucket_T.dtype)
    return order_T, torch.searchsorted(sorted_T, edges)


def bucket_sums(grad_TD: Tensor, bucket_T: Tensor, count: int) -> Tensor:
    """The sum of what every bucket got, in the order of the tokens."""
    return segment_sum(grad_TD, *grouped(bucket_T, count))
