"""Tokens scaled, with a learned vector for their position and one for their age: `reference` and `triton`.

out_TD = position_time(x_TD, offsets_B1, times_T, position_weight_PD, time_weight_QD, scale=.., context=8, longest=..)

`forward` and `backward` are its two halves for callers that keep their own books. Times are whole seconds; the age of a
token is its distance to the last token of its row. `longest`: no row is longer.

Shapes: B rows, T tokens of all rows, D width, P positions, Q ages.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from .. import choice
from ..choice import Name
from .reference import buckets

__all__ = ["Name", "backward", "buckets", "choose", "forward", "position_time"]


def choose(name: Name, device: torch.device) -> tuple[ModuleType, str]:
    """The implementation and why; an explicit wish that cannot be met is an error."""
    return choice.choose(
        __name__, name, device, what="position and time", subject="the tokens", fix="ask for the reference",
        bodies=("reference", "triton"),
    )  # fmt: skip


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
    impl: Name = "auto",
) -> Tensor:
    """`scale * x + position_weight[position] + time_weight[age]`, in the type of x."""
    if not 0 <= context < position_weight_PD.shape[0]:
        raise ValueError(f"context {context}, of {position_weight_PD.shape[0]} positions: one must be left after it")
    body, _ = choose(impl, x_TD.device)
    found = body.forward(
        x_TD, offsets_B1, times_T, position_weight_PD, time_weight_QD, scale=scale, context=context, longest=longest
    )
    return cast(Tensor, found)


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
    impl: Name = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x (in the type of the gradient) and of both weights (at least float32), summed in a fixed order."""
    body, _ = choose(impl, grad_TD.device)
    found = body.backward(
        grad_TD, offsets_B1, times_T, positions=positions, ages=ages, scale=scale, context=context, longest=longest
    )
    return cast(tuple[Tensor, Tensor, Tensor], found)


class _PositionTime(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, offsets_B1: Tensor, times_T: Tensor, position_PD: Tensor, time_QD: Tensor, how: Any
    ) -> Tensor:
        ctx.save_for_backward(offsets_B1, times_T)
        ctx.how, ctx.kinds = how, (position_PD.dtype, time_QD.dtype)
        ctx.sizes = {"positions": position_PD.shape[0], "ages": time_QD.shape[0]}
        return forward(x_TD, offsets_B1, times_T, position_PD, time_QD, **how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        offsets_B1, times_T = ctx.saved_tensors
        dx_TD, position_PD, time_QD = backward(grads[0], offsets_B1, times_T, **ctx.sizes, **ctx.how)
        return dx_TD, None, None, position_PD.to(ctx.kinds[0]), time_QD.to(ctx.kinds[1]), None


def position_time(
    x_TD: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor,
    position_weight_PD: Tensor,
    time_weight_QD: Tensor,
    *,
    scale: float,
    context: int,
    longest: int,
    impl: Name = "auto",
) -> Tensor:
    """`forward`, differentiable."""
    how = {"scale": scale, "context": context, "longest": longest, "impl": impl}
    given = (x_TD, offsets_B1, times_T, position_weight_PD, time_weight_QD)
    out_TD: Tensor = _PositionTime.apply(*given, how)  # type: ignore[no-untyped-call]
    return out_TD
