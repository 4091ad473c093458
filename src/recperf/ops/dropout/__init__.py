"""Dropout that a seed, a row and a column decide: the same values in every body, in a recomputation, after a resume.

dropout = Dropout(0.2, dropout_seed(seed, step, layer, "tokens"))
tokens_TD = drop(tokens_TD, dropout)                       # differentiable
kept_TD = keep_mask(dropout, rows, columns, device)        # the values that stay
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import choice
from ..choice import Name
from .reference import keep_mask
from .rule import Dropout, dropout_seed

__all__ = ["Dropout", "Name", "choose", "drop", "dropout_seed", "keep_mask"]

choose = functools.partial(choice.choose, __name__)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, dropout: Dropout, body: ModuleType) -> Tensor:
        ctx.dropout, ctx.body = dropout, body
        dropped_TD: Tensor = body.forward(x_TD, dropout)
        return dropped_TD

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, None, None]:
        return ctx.body.forward(gradient_TD, ctx.dropout), None, None


def drop(x_TD: Tensor, dropout: Dropout, impl: Name = "auto") -> Tensor:
    """Dropout of rows, differentiable."""
    if dropout.rate == 0.0:
        return x_TD
    body, _ = choose("reference" if impl == "auto" and x_TD.dtype == torch.float64 else impl, x_TD.device)
    dropped_TD: Tensor = _Drop.apply(x_TD, dropout, body)  # type: ignore[no-untyped-call]
    return dropped_TD
