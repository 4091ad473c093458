"""Assembles the tokens of a batch in one pass from rows that many positions share: `reference` and `triton`.

recipe = plan(offsets_B1, times_T, ids.inverse_N, ids.order_N, ids.starts_U1, action_S, actions=9, ages=2049, context=8,
           longest=...)                                                                 # outside the step
out_TD = assemble(context_BCD, rows_UD, actions_KD, position_weight_PD, time_weight_QD, recipe, scale=..., dropout=...)

A position is `scale * (row + action) + position + age`, a token of context `scale * context + position + age`; dropout
follows. No tensor is written in between.

Shapes: B rows, C context tokens a row, T tokens, S positions, U shared rows, K actions, P positions, Q ages, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from .. import choice
from ..choice import Name
from ..dropout import NO_DROPOUT, Dropout

choose = functools.partial(choice.choose, __name__)
forward: Callable[..., Tensor] = choice.dispatch(__name__, "forward")
backward: Callable[..., tuple[Tensor, ...]] = choice.dispatch(__name__, "backward")
"""Gradients of context (in the type of the gradient), rows, actions, positions and ages (at least float32)."""


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: AssemblyPlan, options: dict[str, Any], *parts: Tensor) -> Tensor:
        ctx.plan, ctx.options, ctx.positions = plan, options, parts[3].shape[0]
        ctx.dtypes = [part.dtype for part in parts]
        return forward(*parts, plan, **options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = backward(grads[0], ctx.plan, positions=ctx.positions, **ctx.options)
        return None, None, *(part.to(dtype) for part, dtype in zip(gradients, ctx.dtypes))


def assemble(
    context_BCD: Tensor,
    rows_UD: Tensor,
    actions_KD: Tensor,
    position_weight_PD: Tensor,
    time_weight_QD: Tensor,
    plan: AssemblyPlan,
    *,
    scale: float,
    dropout: Dropout = NO_DROPOUT,
    impl: Name = "auto",
) -> Tensor:
    """The tokens, in the type of the rows; differentiable."""
    parts = (context_BCD, rows_UD, actions_KD, position_weight_PD, time_weight_QD)
    options = {"scale": scale, "dropout": dropout, "impl": impl}
    _check(*parts, plan)
    out_TD: Tensor = _Assemble.apply(plan, options, *parts)  # type: ignore[no-untyped-call]
    return out_TD


def _check(context: Tensor, rows: Tensor, actions: Tensor, position: Tensor, time: Tensor, plan: AssemblyPlan) -> None:
    """Refuse tables smaller than planned: a kernel would read beyond their end."""
    planned = (
        (plan.offsets_B1.numel() - 1, plan.context), plan.source_starts_U1.numel() - 1, plan.actions, plan.ages
    )  # fmt: skip
    actual = (tuple(context.shape[:2]), rows.shape[0], actions.shape[0], time.shape[0])
    if planned != actual:
        raise ArgumentError(f"(rows and context, shared rows, actions, ages) are {actual}; the plan is for {planned}")
    if plan.context >= position.shape[0]:
        raise ArgumentError(f"the position table has {position.shape[0]} rows; it needs more than {plan.context}")


SHORTEST, UNIT = 1e-6, 60.0
"""Seconds: the smallest age, and the unit in which an age is counted before its square root is taken."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AssemblyPlan:
    offsets_B1: Tensor
    """Where each row begins among the tokens."""
    source_S: Tensor
    """The shared row that each position reads."""
    action_S: Tensor
    """The action of each position."""
    age_T: Tensor
    """The row of the time table that each token reads."""
    source_order_S: Tensor
    """Tokens ordered by the shared row they read."""
    source_starts_U1: Tensor
    kind_order_T: Tensor
    """Tokens ordered by age, then action; context tokens count as one more action."""
    kind_starts: Tensor
    """Where each pair of age and action begins in that order, Q * (K + 1) + 1 entries."""
    actions: int
    ages: int
    context: int
    """Context tokens in every row."""
    longest: int
    """The largest number of tokens in a row."""

    @property
    def tokens(self) -> int:
        return self.age_T.shape[0]


@torch.no_grad()
def plan(
    offsets_B1: Tensor,
    times_T: Tensor,
    source_S: Tensor,
    order_S: Tensor,
    starts_U1: Tensor,
    action_S: Tensor,
    *,
    actions: int,
    ages: int,
    context: int,
    longest: int,
) -> AssemblyPlan:
    """`order_S` and `starts_U1` list the positions of each row, as in `lookup.Unique`. Never waits for the device."""
    tokens, rows = times_T.numel(), offsets_B1.numel() - 1
    if source_S.numel() != tokens - rows * context or action_S.numel() != source_S.numel():
        raise ArgumentError(
            f"source_S has {source_S.numel()} and action_S {action_S.numel()} entries; {tokens} tokens in {rows} rows "
            f"with {context} context tokens each have {tokens - rows * context} positions"
        )
    before_B1 = context * torch.arange(rows + 1, device=times_T.device)
    row_S = row_of_token(offsets_B1 - before_B1, source_S.numel())
    token_S = torch.arange(source_S.numel(), device=times_T.device) + before_B1[1:][row_S]
    action_T = torch.full_like(times_T, actions).index_copy_(0, token_S, action_S.to(times_T.dtype))
    age_T = ages_of(offsets_B1, times_T, ages)
    pairs = ages * (actions + 1)
    order_T, kind_starts = grouped((age_T * (actions + 1) + action_T).to(_narrow(pairs)), pairs)
    return AssemblyPlan(
        offsets_B1=offsets_B1,
        source_S=source_S.to(_narrow(starts_U1.numel())),
        action_S=action_S.to(_narrow(actions)),
        age_T=age_T.to(_narrow(ages)),
        source_order_S=token_S[order_S].to(_narrow(tokens)),
        source_starts_U1=starts_U1,
        kind_order_T=order_T.to(_narrow(tokens)),
        kind_starts=kind_starts,
        actions=actions,
        ages=ages,
        context=context,
        longest=longest,
    )  # fmt: skip


def row_of_token(offsets_B1: Tensor, tokens: int) -> Tensor:
    rows_B = torch.arange(offsets_B1.numel() - 1, device=offsets_B1.device)
    return rows_B.repeat_interleave(offsets_B1.diff(), output_size=tokens)


def ages_of(offsets_B1: Tensor, times_T: Tensor, ages: int) -> Tensor:
    """The row of the time table for each token: the square root of the minutes before the last token of its row."""
    last_T = offsets_B1[1:][row_of_token(offsets_B1, times_T.numel())] - 1
    seconds_T = (times_T[last_T] - times_T).to(torch.float32).clamp(min=SHORTEST)
    # Divided by a tensor: a CUDA device multiplies by the inverse of a plain number, which rounds otherwise. The root
    # is taken in float64 and rounded once: some CPUs' own float32 root is off by a last bit, which moves a bucket.
    root_T = (seconds_T / torch.full((1,), UNIT, device=times_T.device)).double().sqrt().float()
    return root_T.long().clamp(max=ages - 1)


def grouped(bucket_T: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The tokens ordered by bucket, and where each bucket begins in that order."""
    sorted_T, order_T = torch.sort(bucket_T, stable=True)
    edges = torch.arange(count + 1, device=bucket_T.device, dtype=bucket_T.dtype)
    return order_T, torch.searchsorted(sorted_T, edges)


def shared_sums(
    grad_TD: Tensor, plan: AssemblyPlan, scale: float, segment_sum: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows, actions and time table. The sums per pair of age and action serve the last two."""
    rows_UD = segment_sum(grad_TD, plan.source_order_S, plan.source_starts_U1).mul_(scale)
    pairs = segment_sum(grad_TD, plan.kind_order_T, plan.kind_starts)
    pairs_QKD = pairs.view(plan.ages, plan.actions + 1, grad_TD.shape[1])
    return rows_UD, pairs_QKD[:, : plan.actions].sum(0).mul_(scale), pairs_QKD.sum(1)


def _narrow(count: int) -> torch.dtype:
    """The narrowest index type for this many values: indices are read once per token."""
    return torch.int32 if count < 1 << 31 else torch.int64
