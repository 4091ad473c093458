"""The optimizer and the learning rate of a step, both without hidden state beyond AdamW's own moments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def one_cycle(step: int, total: int, *, peak: float, rise: float) -> float:
    """Learning rate of a step: a cosine from peak / 25 up to the peak, then one down to peak / 250,000."""
    start, end = peak / 25, peak / 250_000
    top = max(1.0, rise * total - 1)
    if step <= top:
        return _cosine(start, peak, step / top)
    return _cosine(peak, end, min(1.0, (step - top) / max(1.0, total - 1 - top)))


def _cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * share)) / 2


class AdamW:
    """AdamW by torch's fused kernel, one call a group of parameters that share a decay.

    The numbers are those of `torch.optim.AdamW(fused=True)`; calling the kernel directly saves that class's
    bookkeeping, which costs more than the arithmetic when a model is this small.
    """

    betas = (0.9, 0.999)
    eps = 1e-8

    def __init__(self, groups: list[tuple[list[nn.Parameter], float]]) -> None:
        self.taken = torch.zeros((), device=groups[0][0][0].device)
        """Steps taken, where the kernel wants it: beside the parameters."""
        self.groups = [_Group(parameters, decay) for parameters, decay in groups]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter and clear its gradient."""
        self.taken += 1
        for group in self.groups:
            torch._fused_adamw_(
                group.parameters,
                group.gradients(),
                group.means,
                group.squares,
                [],
                [self.taken] * len(group.parameters),
                lr=learning_rate,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=group.decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
            for parameter in group.parameters:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        moments = [{"means": group.means, "squares": group.squares} for group in self.groups]
        return {"taken": self.taken, "moments": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken.copy_(state["taken"])
        for group, saved in zip(self.groups, state["moments"], strict=True):
            for name in ("means", "squares"):
                for ours, theirs in zip(getattr(group, name), saved[name], strict=True):
                    ours.copy_(theirs)


class _Group:
    """Parameters that share a decay, and their moments."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.parameters: list[Tensor] = [*parameters]
        self.decay = decay
        self.means = [torch.zeros_like(p, requires_grad=False) for p in parameters]
        self.squares = [torch.zeros_like(p, requires_grad=False) for p in parameters]

    def gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        assert len(found) == len(self.parameters), "a parameter has no gradient"
        return found
