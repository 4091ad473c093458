"""The exact softmax loss over a catalogue, and the items with the highest scores, without ever storing all scores:
`reference` (plain torch, some positions at a time), `native` (C, a CPU) and `triton` (a GPU).

loss = softmax_loss(users_TD, items_ID, targets_T, temperature=0.05, cosine=True)     # differentiable
scores_TK, items_TK, _ = top(users_TD, items_ID, 10, masks=Masks(offsets_S1, items_M))

The forward pass leaves one logarithm and one vector for each position: the mean of the items by their probabilities,
which is in the gradient of its user. The backward pass computes the scores again for the gradients of the items. Each
sum has one order, so that repeats have the same bits.

Shapes: T positions, I items, N of them at a time, D width, S masks, M items of all masks, K items of a list.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ArgumentError
from .. import choice
from ..choice import Name
from .reference import Masks, Scoring

__all__ = ["Masks", "Shards", "choose", "softmax_loss", "top"]

choose = functools.partial(choice.choose, __name__)

MOST = 60.0
"""The largest score whose exponential needs no shift: the sum of a billion is a number of float32."""
STREAMED = 1 << 18
"""Items that are brought to the device at a time where they lie elsewhere."""
EPS = 1e-6
"""The least length that a vector is divided by."""


class Shards(Protocol):
    """The processes that each have a part of a catalogue."""

    first: int
    """The number of this part's first item."""

    def sum_(self, values: Tensor) -> Tensor:
        """The sum over the processes, in place."""

    def logarithms(self, logs_T: Tensor) -> Tensor:
        """Of the sums over the processes, from the logarithms of each one's."""


def softmax_loss(
    users_TD: Tensor,
    items_ID: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    cosine: bool = False,
    bounded: bool = False,
    bias_I: Tensor | None = None,
    masks: Masks | None = None,
    smoothing: float = 0.0,
    weights_T: Tensor | None = None,
    shards: Shards | None = None,
    impl: Name = "auto",
) -> Tensor:
    """The mean over positions of the cross entropy of softmax(users . items / temperature + bias) and the target, a row
    of the items; with `weights_T`, none below 0, the weighted sum. Differentiable in the users, the items and the bias.

    `cosine`: users and items are divided by their lengths first. `bounded`: no product is above 1 or below -1. A target
    is never masked. `smoothing`: the share of the target that all items share that are not masked. The items may lie in
    host memory: some are brought to the users' device at a time, and their gradients back. With `shards` they are a
    part of the catalogue, whose other parts other processes have; users, targets and weights are the same in all.
    """
    if cosine:
        users_TD, items_ID = (F.normalize(rows, dim=1, eps=EPS) for rows in (users_TD, items_ID))
    _require_fit(users_TD, items_ID, bias_I)
    low = (cosine or bounded) and bias_I is None and 1 / temperature <= MOST
    first = shards.first if shards else 0
    if shards and (smoothing or bias_I is not None):
        raise ArgumentError("a catalogue in shards has no bias and no smoothing")
    scoring = Scoring(scale=1 / temperature, masks=masks, targets_T=targets_T, bounded=low, first=first)
    if weights_T is None:
        weights_T = users_TD.new_full((len(users_TD),), 1 / max(1, len(users_TD)), dtype=_wide(users_TD))
    weights_T = weights_T.detach().to(_wide(users_TD))
    call = _Call(_body(impl, users_TD), scoring, targets_T, weights_T, 1 - smoothing, shards)
    with torch.autocast(users_TD.device.type, enabled=False):
        loss: Tensor = _Softmax.apply(call, users_TD, items_ID, bias_I)  # type: ignore[no-untyped-call]
        return loss - smoothing * _mean_scores(call, users_TD, items_ID, bias_I) if smoothing else loss


def top(
    users_TD: Tensor,
    items_ID: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    bias_I: Tensor | None = None,
    masks: Masks | None = None,
    targets_T: Tensor | None = None,
    impl: Name = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The k highest scores of each position in float32 and the numbers of their items, of equal scores the lowest
    number first; -infinity and -1 where fewer items are left. NaN never comes.

    With `targets_T` also how many items have a score that is not below that of the target, the target among them: its
    rank where equal scores and NaN count against it. A masked target comes last. The items may lie in host memory."""
    _require_fit(users_TD, items_ID, bias_I)
    scoring = Scoring(scale=1 / temperature, bias_I=bias_I, masks=masks)
    with torch.no_grad(), torch.autocast(users_TD.device.type, enabled=False):
        highest: tuple[Tensor, Tensor, Tensor | None] = _body(impl, users_TD).top(
            users_TD, items_ID, scoring, k, targets_T
        )
        return highest


@dataclass(frozen=True, eq=False)
class _Call:
    body: ModuleType
    scoring: Scoring
    targets_T: Tensor
    weights_T: Tensor
    share: float
    """The target's own part of the probability that is wanted."""
    shards: Shards | None = None

    def own(self, items_ID: Tensor, users_TD: Tensor) -> Tensor:
        """The vectors of the targets."""
        if self.shards is None:
            return _rows(items_ID, self.targets_T, users_TD)
        places_T = self.targets_T - self.shards.first
        inside_T = (places_T >= 0) & (places_T < len(items_ID))
        return self.shards.sum_(_rows(items_ID, places_T.where(inside_T, 0), users_TD) * inside_T[:, None])


class _Softmax(torch.autograd.Function):
    """The loss without what label smoothing adds."""

    @staticmethod
    def forward(ctx: Any, call: _Call, users_TD: Tensor, items_ID: Tensor, bias_I: Tensor | None) -> Tensor:
        logs_T: Any = None
        mean_TD: Any = None
        for scoring, block_ND in _blocks(call, users_TD, items_ID, bias_I):
            more_T, part_TD = call.body.forward(users_TD, block_ND, scoring, mean=ctx.needs_input_grad[1])
            if logs_T is None:
                logs_T, mean_TD = more_T, part_TD
                continue
            before_T, logs_T = logs_T, torch.logaddexp(logs_T, more_T)
            if mean_TD is not None:
                mean_TD = mean_TD * (before_T - logs_T).exp()[:, None] + part_TD * (more_T - logs_T).exp()[:, None]
        if call.shards is not None:
            before_T, logs_T = logs_T, call.shards.logarithms(logs_T)
            if mean_TD is not None:
                mean_TD = call.shards.sum_(mean_TD * (before_T - logs_T).exp()[:, None].to(mean_TD.dtype))
        own_TD = call.own(items_ID, users_TD)
        own_T = (users_TD.to(own_TD.dtype) * own_TD).sum(1) * call.scoring.scale
        if bias_I is not None:
            own_T += _rows(bias_I, call.targets_T, users_TD)
        ctx.call = call
        ctx.save_for_backward(users_TD, items_ID, bias_I, logs_T, mean_TD)
        loss: Tensor = ((logs_T - call.share * own_T) * call.weights_T).sum()
        return loss.to(call.weights_T.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        users_TD, items_ID, bias_I, logs_T, mean_TD = ctx.saved_tensors
        call, (_, users, items, bias) = ctx.call, ctx.needs_input_grad
        wanted_T, scale, d_users_TD = call.weights_T * (grad * call.share), call.scoring.scale, None
        if users:
            own_TD = call.own(items_ID, users_TD).mul_(call.share)
            d_users_TD = (mean_TD - own_TD).mul_((call.weights_T * grad * scale)[:, None]).to(users_TD.dtype)
        parts: list[list[Tensor | None]] = []
        for scoring, block_ND in _blocks(call, users_TD, items_ID, bias_I) if items or bias else ():
            added_ND, sums_N = call.body.items_backward(
                users_TD, block_ND, scoring, logs_T, call.weights_T, grad, sums=bias
            )
            places_T = call.targets_T - scoring.first
            _add_at(added_ND, places_T, users_TD * (-scale * wanted_T)[:, None])
            if bias:
                _add_at(sums_N, places_T, -wanted_T)
            parts.append([added_ND.to(items_ID), sums_N.to(bias_I) if bias else None])
        d_items_bias = [one[0] if len(one) == 1 or one[0] is None else torch.cat(one) for one in zip(*parts)]
        return None, d_users_TD, *(d_items_bias or (None, None))


def _blocks(call: _Call, users_TD: Tensor, items_ID: Tensor, bias_I: Tensor | None) -> Iterator[tuple[Scoring, Tensor]]:
    """All items, or where they lie elsewhere some at a time: while these are worked on, the next are copied."""
    if not _elsewhere(users_TD, items_ID):
        yield replace(call.scoring, bias_I=bias_I), items_ID
        return
    device = users_TD.device
    ahead = torch.cuda.Stream(device) if users_TD.is_cuda else None  # type: ignore[no-untyped-call]

    def copied(first: int) -> Tensor:
        with torch.cuda.stream(ahead):
            return items_ID[first : first + STREAMED].to(device, non_blocking=True)

    next_ND = copied(0)
    for first in range(0, len(items_ID), STREAMED):
        block_ND = next_ND
        if ahead is not None:
            current = torch.cuda.current_stream(device)
            current.wait_stream(ahead)
            block_ND.record_stream(current)
        next_ND = copied(first + STREAMED)
        bias_N = None if bias_I is None else bias_I[first : first + STREAMED].to(device)
        yield replace(call.scoring, bias_I=bias_N, first=call.scoring.first + first), block_ND


def _elsewhere(users_TD: Tensor, items_ID: Tensor) -> bool:
    return items_ID.device != users_TD.device


def _add_at(out: Tensor, places_T: Tensor, values: Tensor) -> None:
    """Add values to some rows, in a fixed order where several meet in one; those outside are passed over."""
    inside_T = (places_T >= 0) & (places_T < len(out))
    places_T, values = places_T.where(inside_T, 0), values * inside_T.view(-1, *[1] * (values.dim() - 1))
    if out.is_cuda:
        out.index_put_((places_T,), values.to(out.dtype), accumulate=True)
    else:
        out.index_add_(0, places_T, values.to(out.dtype))


def _mean_scores(call: _Call, users_TD: Tensor, items_ID: Tensor, bias_I: Tensor | None) -> Tensor:
    """The weighted sum over positions of the mean score of the items that are not masked; differentiable by torch.

    F is the vector of an item, its bias, and a 1 that counts it."""
    kind, here, masks = _wide(users_TD), users_TD.device, call.scoring.masks
    items_ID = items_ID.to(kind)
    bias_I = items_ID.new_zeros(len(items_ID)) if bias_I is None else bias_I.to(kind)
    rows_IF = torch.cat([items_ID * call.scoring.scale, torch.stack([bias_I, torch.ones_like(bias_I)], 1)], 1)
    sums_TF = rows_IF.sum(0).to(here).expand(len(users_TD), -1)
    if masks is not None:
        own_TF = _rows(rows_IF, call.targets_T, users_TD) * masks.have(call.targets_T)[:, None]
        masked_SF = masks.sums(rows_IF).to(here)
        sums_TF = sums_TF - (masked_SF if masks.masks_T is None else masked_SF[masks.masks_T]) + own_TF
    products_T = (users_TD.to(kind) * sums_TF[:, :-2]).sum(1)
    return ((products_T + sums_TF[:, -2]) / sums_TF[:, -1] * call.weights_T).sum()


def _rows(rows: Tensor, places_T: Tensor, users_TD: Tensor) -> Tensor:
    """Some rows of what may lie elsewhere, on the users' device, in float32 or wider."""
    picked = rows.index_select(0, places_T.to(rows.device)).to(users_TD.device)
    return picked.to(_wide(picked))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _body(impl: Name, users_TD: Tensor) -> ModuleType:
    """The implementation. Kernels do not compute float64, and that of a GPU is for bfloat16: in float32 torch's own
    products are used unless it is requested."""
    plain = users_TD.dtype == torch.float64 or (users_TD.is_cuda and users_TD.dtype != torch.bfloat16)
    return choose("reference" if impl == "auto" and plain else impl, users_TD.device)[0]


def _require_fit(users_TD: Tensor, items_ID: Tensor, bias_I: Tensor | None) -> None:
    if users_TD.shape[1:] != items_ID.shape[1:] or users_TD.dim() != 2 or users_TD.dtype != items_ID.dtype:
        described = " and ".join(f"{one.dtype} of shape {tuple(one.shape)}" for one in (users_TD, items_ID))
        raise ArgumentError(f"users_TD and items_ID are {described}; they must have one type and one width")
    if bias_I is not None and bias_I.shape != items_ID.shape[:1]:
        has = f"bias_I has shape {tuple(bias_I.shape)}"
        raise ArgumentError(f"{has}; it must have one number for each of {len(items_ID)} items")
