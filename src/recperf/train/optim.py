"""The optimizer and the learning rate of a step, both without hidden state beyond AdamW's own moments."""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import TrainConfig


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
    """Fused AdamW whose tables decay at a rate of their own and whose learning rate comes with each step."""

    def __init__(self, tables: list[nn.Parameter], dense: list[nn.Parameter], config: TrainConfig) -> None:
        groups = [
            {"params": dense, "weight_decay": config.weight_decay},
            {"params": tables, "weight_decay": config.table_weight_decay},
        ]
        self.inner = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)

    def step(self, learning_rate: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)
