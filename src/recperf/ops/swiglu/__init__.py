"""A gate and what it lets through: silu(gate) * up, where a row of the input has the gate first: `reference` (plain
torch, any device) or `triton` (a GPU).

fed_TF = swiglu(both_TG)                                   # differentiable

Shapes: T rows, F columns of the result, G = 2F.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import choice
from ..choice import Name

choose = functools.partial(choice.choose, __name__)


def swiglu(both_TG: Tensor, impl: Name = "auto") -> Tensor:
    """silu of the first half of each row times the second."""
    body, _ = choose("reference" if impl == "auto" and both_TG.dtype == torch.float64 else impl, both_TG.device)
    fed_TF: Tensor = _Gate.apply(both_TG, body)  # type: ignore[no-untyped-call]
    return fed_TF


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_TG: Tensor, body: ModuleType) -> Tensor:
        ctx.save_for_backward(both_TG)
        ctx.body = body
        fed_TF: Tensor = body.forward(both_TG)
        return fed_TF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.body.backward(grads[0], ctx.saved_tensors[0]), None
