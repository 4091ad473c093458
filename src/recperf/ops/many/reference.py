"""Copies and SGD of many tensors by torch's functions for lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, or into the first columns of a wider one, which keeps the others."""
    even = [(target, source) for target, source in zip(targets, sources) if target.shape == source.shape]
    for target, source in zip(targets, sources):
        if target.shape != source.shape:
            # Apart from the others: among them it would prevent copying all by one kernel.
            target[:, : source.shape[1]].copy_(source)
    if even:
        torch._foreach_copy_([target for target, _ in even], [source for _, source in even])


def descend(parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: float | Tensor) -> None:
    """Subtract each gradient times the rate."""
    torch._fused_sgd_(
        list(parameters),
        list(gradients),
        [],
        lr=rate,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
