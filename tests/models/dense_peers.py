"""Optimizers of tables in plain torch, for dense gradients or such of the rows that a step used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RowWiseAdagrad:
    """In plain torch, for a dense gradient."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        self.weight, self.eps, self.sums_R = weight, eps, torch.zeros(len(weight))
        self.param_groups = [{"lr": 0.0}]

    def step(self) -> None:
        assert self.weight.grad is not None
        self.sums_R += self.weight.grad.square().mean(1)
        self.weight.data -= self.param_groups[0]["lr"] * self.weight.grad / (self.sums_R.sqrt() + self.eps)[:, None]


PEERS: dict[str, Any] = {
    "sgd": lambda weight, eps: torch.optim.SGD([weight], lr=1.0),
    "adagrad": lambda weight, eps: torch.optim.Adagrad([weight], lr=1.0, eps=eps),
    "rowwise-adagrad": lambda weight, eps: RowWiseAdagrad(weight, eps),
    "adam": lambda weight, eps: torch.optim.SparseAdam([weight], lr=1.0, eps=eps),
}
