"""Embedding rows that are not pooled: `reference` (plain torch, any device) and `triton` (one GPU).

ids = unique(ids_N)                                                      # waits for the device once
rows_UD = gather(table_RD, ids.values_U)
tokens_ND = expand(rows_UD, ids.inverse_N, ids.order_N, ids.starts_U1)   # differentiable, summed in a fixed order
update_rows_(table_RD, state, ids.values_U, grad_UD, rule="rowwise-adagrad", rate=..., eps=...)   # in place
grad_UD = segment_sum(grad_ND, ids.order_N, ids.starts_U1)

`table_rules` declares the rules of an update; no row may come twice.

Shapes: R table rows, D width, N looked-up rows or ids, U distinct ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import choice
from ..choice import Name

__all__ = ["Unique", "choose", "expand", "gather", "segment_sum", "unique", "update_rows_"]

choose = functools.partial(choice.choose, __name__)
gather: Callable[..., Tensor] = choice.dispatch(__name__, "gather")
segment_sum: Callable[..., Tensor] = choice.dispatch(__name__, "segment_sum")
update_rows_ = choice.dispatch(__name__, "update_rows_")


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
    is_first_N = torch.ones_like(sorted_N, dtype=torch.bool)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=is_first_N[1:])
    firsts_U = is_first_N.nonzero().squeeze(1)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = is_first_N.cumsum(0) - 1
    end_1 = torch.full((1,), ids_N.numel(), dtype=firsts_U.dtype, device=ids_N.device)
    return Unique(
        values_U=sorted_N[firsts_U], inverse_N=inverse_N, order_N=order_N, starts_U1=torch.cat([firsts_U, end_1])
    )


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, inverse_N: Tensor, order_N: Tensor, starts_U1: Tensor, impl: Name) -> Tensor:
        ctx.save_for_backward(order_N, starts_U1)
        ctx.impl, ctx.kind = impl, rows_UD.dtype
        return gather(rows_UD, inverse_N, impl=impl)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        summed_UD = segment_sum(grads[0], *ctx.saved_tensors, impl=ctx.impl)
        return summed_UD.to(ctx.kind), None, None, None, None


def expand(rows_UD: Tensor, inverse_N: Tensor, order_N: Tensor, starts_U1: Tensor, *, impl: Name = "auto") -> Tensor:
    """`rows_UD[inverse_N]`, differentiable; the other two say which of the N took each row, as in `Unique`."""
    tokens_ND: Tensor = _Expand.apply(rows_UD, inverse_N, order_N, starts_U1, impl)  # type: ignore[no-untyped-call]
    return tokens_ND
