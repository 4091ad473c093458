"""The softmax loss of next items, with its gradients computed in the forward pass, so that scores are never stored; of
a whole catalogue in bfloat16 by the kernel of the op.

Shapes: T positions of all sequences, D width, K candidates, C positions of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.catalogue_softmax import softmax_loss
from .config import CHUNK

SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores held at a time: on a CPU few enough for its caches."""
MOST = 60.0
"""The largest score: the sum of the exponentials of a billion such scores is a number of float32."""


def full_loss(
    users_TD: Tensor, items_KD: Tensor, targets_T: Tensor, temperature: float, weights_T: Tensor | None = None,
    *, bounded: bool = True, low: bool = False,
) -> Tensor:  # fmt: skip
    """The mean over positions of -log softmax(users . items / temperature) at the target, a row of the items; with
    `weights_T` the weighted sum. `bounded`: no product is above 1. `low`: on a GPU the vectors are rounded to
    bfloat16."""
    if low and users_TD.is_cuda:
        users_TD, items_KD = users_TD.bfloat16(), items_KD.bfloat16()
    if users_TD.dtype == torch.bfloat16 or (not users_TD.is_cuda and len(users_TD) * len(items_KD) > CHUNK):
        return softmax_loss(
            users_TD, items_KD, targets_T, temperature=temperature, bounded=bounded, weights_T=weights_T
        )
    loss: Tensor = _Softmax.apply(users_TD, items_KD, targets_T, None, None, weights_T, temperature, bounded)  # type: ignore[no-untyped-call]
    return loss


def sampled_loss(
    users_TD: Tensor, owns_TD: Tensor, drawn_KD: Tensor, same_TK: Tensor, temperature: float,
    weights_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same over each position's own next item and drawn ones; a drawn item that is the own one does not count."""
    loss: Tensor = _Softmax.apply(users_TD, drawn_KD, None, owns_TD, same_TK, weights_T, temperature, True)  # type: ignore[no-untyped-call]
    return loss


class _Softmax(torch.autograd.Function):
    """Scores are cosines over the temperature, so that their exponentials need no shift: see MOST. Those against the
    whole catalogue may be others, which are shifted by the highest of their position."""

    @staticmethod
    def forward(
        ctx: Any,
        users_TD: Tensor,
        items_KD: Tensor,
        targets_T: Tensor | None,
        owns_TD: Tensor | None,
        same_TK: Tensor | None,
        weights_T: Tensor | None,
        temperature: float,
        bounded: bool,
    ) -> Tensor:
        if weights_T is None:
            weights_T = users_TD.new_full((len(users_TD),), 1 / max(1, len(users_TD)))
        weights_T1 = weights_T[:, None]
        total, sharp_TD = users_TD.new_zeros(()), users_TD / temperature
        d_users_TD, d_items_KD = torch.empty_like(users_TD), torch.zeros_like(items_KD)
        own_T1 = None if owns_TD is None else (sharp_TD * owns_TD).sum(1, keepdim=True)
        errors = []
        together = max(1, SCORES[users_TD.device.type] // len(items_KD))
        for first in range(0, len(users_TD), together):
            part = slice(first, first + together)
            sharp_CD, weights_C1 = sharp_TD[part], weights_T1[part]
            scores_CK = torch.mm(sharp_CD, items_KD.t())
            if targets_T is not None:
                targets_C1 = targets_T[part, None]
                if not bounded:
                    scores_CK -= scores_CK.amax(1, keepdim=True)
                own_C1 = scores_CK.gather(1, targets_C1)
                sum_C1 = scores_CK.exp_().sum(1, keepdim=True)
                scores_CK.scatter_add_(1, targets_C1, -sum_C1)
            else:
                assert same_TK is not None
                assert own_T1 is not None
                own_C1 = own_T1[part]
                scores_CK.masked_fill_(same_TK[part], -torch.inf)
                sum_C1 = scores_CK.exp_().sum(1, keepdim=True) + own_C1.exp()
                errors.append(own_C1.exp() / sum_C1 - 1)
            total += ((sum_C1.log() - own_C1) * weights_C1).sum()
            scales_C1 = weights_C1 / sum_C1
            torch.mm(scores_CK, items_KD, out=d_users_TD[part])
            d_users_TD[part] *= scales_C1
            d_items_KD.addmm_(scores_CK.t(), sharp_CD * scales_C1)
        gradients = [d_users_TD.div_(temperature), d_items_KD]
        if owns_TD is not None:
            error_T1 = torch.cat(errors) * weights_T1
            d_users_TD.addcmul_(error_T1 / temperature, owns_TD)
            gradients.append(error_T1 * sharp_TD)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_users_TD, d_items_KD, *d_owns = (gradient * grads[0] for gradient in ctx.saved_tensors)
        return d_users_TD, d_items_KD, None, d_owns[0] if d_owns else None, None, None, None, None
