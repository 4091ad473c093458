"""Layer normalisation of rows, and x * sigmoid(of it): `reference` (plain torch, any device) and `triton` (a GPU).

normed = layer_norm(x, weight, bias, eps)                  # differentiable, in the type of x or another `kind`
normed = layer_norm(x, None, None, eps)                    # without weights
gated = swish_layer_norm(x, weight, bias, eps)

body, why = choose("auto", device)                         # where the backward pass is written out
normed_TD, stats_2T = body.forward(x_TD, weight_D, bias_D, eps, swish=False)
dx_TD, dweight_D, dbias_D = body.backward(grad_TD, x_TD, weight_D, bias_D, stats_2T, swish=False, residual_TD=None)
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


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float, swish: bool,
        kind: torch.dtype | None, body: ModuleType,
    ) -> Tensor:  # fmt: skip
        normed_TD: Tensor
        normed_TD, stats_2T = body.forward(x_TD, weight_D, bias_D, eps, swish=swish, kind=kind)
        ctx.save_for_backward(x_TD, weight_D, bias_D, stats_2T)
        ctx.swish, ctx.body = swish, body
        return normed_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D, bias_D, stats_2T = ctx.saved_tensors
        dx, dweight, dbias = ctx.body.backward(grad_TD, x_TD, weight_D, bias_D, stats_2T, swish=ctx.swish)
        if weight_D is not None:
            dweight, dbias = dweight.to(weight_D.dtype), dbias.to(bias_D.dtype)
        return dx, dweight, dbias, None, None, None, None


def layer_norm(
    x: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float, impl: Name = "auto",
    kind: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Every last dimension of x with mean 0 and variance 1, times the weight, plus the bias, if there are any."""
    return _normed(x, weight_D, bias_D, eps, impl, kind, swish=False)


def swish_layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, impl: Name = "auto") -> Tensor:
    """x * sigmoid(layer_norm(x))."""
    return _normed(x, weight_D, bias_D, eps, impl, None, swish=True)


def _normed(
    x: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float, impl: Name, kind: torch.dtype | None, *,
    swish: bool,
) -> Tensor:  # fmt: skip
    # The kernels compute in float32, which is not enough for float64.
    body, _ = choose("reference" if impl == "auto" and x.dtype == torch.float64 else impl, x.device)
    x_TD = x.reshape(-1, x.shape[-1])
    normed_TD: Tensor = _Norm.apply(x_TD, weight_D, bias_D, eps, swish, kind, body)  # type: ignore[no-untyped-call]
    return normed_TD.view(x.shape)
