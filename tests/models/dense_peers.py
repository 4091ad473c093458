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


class RowWiseAdam:
    """In plain torch, for a sparse gradient: the rows that it has not stay as they are."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        self.weight, self.eps, self.count = weight, eps, 0
        self.means_RD, self.squares_R = torch.zeros_like(weight.data), torch.zeros(len(weight))
        self.param_groups = [{"lr": 0.0}]

    def step(self) -> None:
        assert self.weight.grad is not None
        self.count += 1
        used, slopes_UD = self.weight.grad.coalesce().indices()[0], self.weight.grad.coalesce().values()
        self.means_RD[used] = 0.9 * self.means_RD[used] + 0.1 * slopes_UD
        self.squares_R[used] = 0.999 * self.squares_R[used] + 0.001 * slopes_UD.square().mean(1)
        means_UD = self.means_RD[used] / (1 - 0.9**self.count)
        roots_U = (self.squares_R[used] / (1 - 0.999**self.count)).sqrt() + self.eps
        self.weight.data[used] -= self.param_groups[0]["lr"] * means_UD / roots_U[:, None]


PEERS: dict[str, Any] = {
    "sgd": lambda weight, eps: torch.optim.SGD([weight], lr=1.0),
    "adagrad": lambda weight, eps: torch.optim.Adagrad([weight], lr=1.0, eps=eps),
    "rowwise-adagrad": lambda weight, eps: RowWiseAdagrad(weight, eps),
    "adam": lambda weight, eps: torch.optim.SparseAdam([weight], lr=1.0, eps=eps),
    "rowwise-adam": RowWiseAdam,
}
