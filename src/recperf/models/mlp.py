"""A stack of linear layers. Widths come in a tuple, the input first."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from .init import normal_


class MLP(nn.Module):
    """Linear layers with ReLU between; `last_relu` puts one after the last layer too."""

    def __init__(self, widths: tuple[int, ...], *, last_relu: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in zip(widths, widths[1:]))
        self.last_relu = last_relu

    def reset(self, seed: int, name: str) -> None:
        """Weights N(0, 2 / (in + out)), biases N(0, 1 / out), each drawn from (seed, its name)."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            normal_(layer.weight, math.sqrt(2 / (layer.in_features + layer.out_features)), seed, f"{name}.{index}.w")
            normal_(layer.bias, math.sqrt(1 / layer.out_features), seed, f"{name}.{index}.b")

    def forward(self, x_BI: Tensor) -> Tensor:
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x_BI = layer(x_BI)
            if index < last or self.last_relu:
                x_BI = F.relu(x_BI)
        return x_BI
