"""Rows of a table, the sum of gradients that meet in a row, and the update of rows, in plain torch.

Shapes: R table rows, D width, N looked-up rows, U distinct rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..table_rules import RULES, RuleName


def gather(table_RD: Tensor, rows_N: Tensor) -> Tensor:
    return table_RD.index_select(0, rows_N)


def segment_sum(grad_ND: Tensor, order_N: Tensor, starts_U1: Tensor) -> Tensor:
    """Sum of `grad_ND[order_N[starts_U1[u]:starts_U1[u + 1]]]` for each u, in that order; at least float32."""
    grad_ND = grad_ND.to(torch.promote_types(grad_ND.dtype, torch.float32))
    # A bag of embeddings adds the rows it gathers one after the other, without writing them out before.
    return F.embedding_bag(order_N, grad_ND, starts_U1.to(order_N.dtype), mode="sum", include_last_offset=True)


def update_rows_(
    table_RD: Tensor,
    state: Tensor | None,
    rows_U: Tensor,
    grad_UD: Tensor,
    *,
    rule: RuleName,
    rate: float | Tensor,
    eps: float,
    count: float | Tensor = 1,
) -> None:
    RULES[rule].apply_(table_RD, state, rows_U, grad_UD, rate=rate, eps=eps, count=count)
