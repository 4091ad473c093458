"""A stack of linear layers. Widths come in a tuple, the input first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .init import normal_


class MLP(nn.Module):
    """Linear layers with ReLU between; `last_relu` puts one after the last layer too."""

    def __init__(self, widths: tuple[int, ...], *, last_relu: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in zip(widths, widths[1:]))
        self.last_relu = last_relu
        self.flat = list(self.layers.parameters())
        """Weights and biases in turn, at hand: walking the module tree for them takes longer than a small layer."""

    def linears(self) -> Iterator[nn.Linear]:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            yield layer

    def reset(self, seed: int, name: str) -> None:
        """Weights N(0, 2 / (in + out)), biases N(0, 1 / out), each drawn from (seed, its name).

        An output without ReLU is a logit: its bias starts at 0, so that an untrained model says one half.
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


def mlp_forward(x_BI: Tensor, parameters: Sequence[Tensor], *, last_relu: bool) -> list[Tensor]:
    """The input and every layer's output: what `mlp_backward` needs. Parameters alternate weight and bias."""
    activations = [x_BI]
    last = len(parameters) - 2
    for index in range(0, len(parameters), 2):
        x_BI = torch.addmm(parameters[index + 1], x_BI, parameters[index].t())
        if index < last or last_relu:
            x_BI.relu_()
        activations.append(x_BI)
    return activations


def mlp_backward(
    gradient_BO: Tensor,
    activations: list[Tensor],
    parameters: Sequence[Tensor],
    *,
    last_relu: bool,
    input_gradient: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradient of the input, where it is wanted, and those of the parameters."""
    gradients: list[Tensor] = []
    last = len(parameters) - 2
    for index in range(last, -1, -2):
        layer = index // 2
        if index < last or last_relu:
            gradient_BO = torch.ops.aten.threshold_backward(gradient_BO, activations[layer + 1], 0)
        gradients += [gradient_BO.sum(0), gradient_BO.t().mm(activations[layer])]
        if index == 0 and not input_gradient:
            return None, gradients[::-1]
        gradient_BO = gradient_BO.mm(parameters[index])
    return gradient_BO, gradients[::-1]
