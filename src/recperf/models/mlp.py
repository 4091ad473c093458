"""A stack of linear layers. Widths are given as a tuple, the input first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .init import normal_


class MLP(nn.Module):
    """Linear layers with ReLU between; `last_relu` adds one after the last layer."""

    def __init__(self, widths: tuple[int, ...], *, last_relu: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in zip(widths, widths[1:]))
        self.last_relu = last_relu

    @property
    def flat(self) -> list[nn.Parameter]:
        """Weights and biases in turn. Read from the layers every time, so that a replaced parameter is seen, and from
        their dictionaries: walking the module tree takes longer than a small layer."""
        parameters: list[dict[str, Any]] = [layer._parameters for layer in self.layers._modules.values() if layer]
        return [by_name[name] for by_name in parameters for name in ("weight", "bias")]

    def linears(self) -> Iterator[nn.Linear]:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            yield layer

    def reset(self, seed: int, name: str) -> None:
        """Draw weights from N(0, 2 / (in + out)) and biases from N(0, 1 / out), each from (seed, its name).

        An output without ReLU is a logit: its bias starts at 0, so that an untrained model predicts one half.
        """
        for index, layer in enumerate(self.linears()):
            normal_(layer.weight, math.sqrt(2 / (layer.in_features + layer.out_features)), seed, f"{name}.{index}.w")
            normal_(layer.bias, math.sqrt(1 / layer.out_features), seed, f"{name}.{index}.b")
        if not self.last_relu:
            nn.init.zeros_(layer.bias)

    def forward(self, x_BI: Tensor) -> Tensor:
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x_BI = layer(x_BI)
            if index < last or self.last_relu:
                x_BI = F.relu(x_BI)
        return x_BI


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient as autograd does, and call its hooks; a frozen parameter gets none.

    The first gradient is stored without a copy, so no other code may write to it.
    """
    if not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    if (hooks := parameter._post_accumulate_grad_hooks) is not None:
        for hook in hooks.values():
            hook(parameter)
