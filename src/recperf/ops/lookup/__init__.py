"""Embedding rows that are not pooled: `reference` (plain torch, any device) and `triton` (one GPU).

ids = unique(ids_N)                                                      # waits for the device once
rows_UD = gather(table_RD, ids.values_U)
tokens_ND = expand(rows_UD, ids.inverse_N, ids.order_N, ids.starts_U1)   # differentiable, summed in a fixed order
update_rows_(table_RD, state, ids.values_U, grad_UD, rule="rowwise-adagrad", rate=..., eps=...)   # in place
grad_UD = segment_sum(grad_ND, ids.order_N, ids.starts_U1)

`table_rules` declares the rules of an update; no row may come twice.

Shapes: R table rows, D width, N looked-up rows, U distinct rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import choice
from ..choice import Name
from .unique import Unique, unique

__all__ = ["Name", "Unique", "choose", "expand", "gather", "segment_sum", "unique", "update_rows_"]

choose = functools.partial(choice.choose, __name__)
gather: Callable[..., Tensor] = choice.dispatch(__name__, "gather")
segment_sum: Callable[..., Tensor] = choice.dispatch(__name__, "segment_sum")
update_rows_ = choice.dispatch(__name__, "update_rows_")


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
