"""The training step of a small DLRM with AdamW in plain torch, and the tensors that every implementation updates.

Shapes: N samples, B samples of a batch, F features, R rows of all tables, D width of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dot import reference as dot

MOST_LAYERS = 16
"""Layers of an MLP that C can hold; it checks them against its own constant."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The tensors of a model and its AdamW. Parameters are in this order everywhere: weights and biases of the bottom
    MLP, of the top MLP, then the table."""

    rows: tuple[int, ...]
    """Rows of the table of each feature; the tables are stacked in one."""
    bottom: list[Tensor]
    """Weights and biases in turn; a ReLU follows every layer."""
    top: list[Tensor]
    """The same, with one output and no ReLU after it."""
    table_RD: Tensor
    means: list[Tensor]
    squares: list[Tensor]
    steps: Tensor
    """The number of steps so far."""
    dot: bool = False
    """Interaction by dot products, in place of concatenation."""
    diagonal: bool = False
    decays: tuple[float, float] = (0.0, 0.0)
    """Weight decay of the MLPs and of the table."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.bottom, *self.top, self.table_RD]


@dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """All samples, one id per feature."""

    dense_ND: Tensor
    ids_FN: Tensor
    labels_N: Tensor


class Step:
    def __init__(self, network: Network, samples: TrainingRows, order_N: Tensor) -> None:
        self.network, self.samples, self.order_N = network, samples, order_N

    def __call__(
        self, first: int, last: int, *, rate: float, norm: bool = False, times: dict[str, int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Train on the samples first..last of the order: returns the loss and, if asked, the norm of the whole
        gradient. Nothing is added to `times`: the parts of this step are not timed."""
        network = self.network
        parameters = [parameter.detach().requires_grad_() for parameter in network.parameters]
        with torch.enable_grad():
            loss = self._loss(parameters, self.order_N[first:last])
            gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            network.steps.add_(1)
            for index, gradient in enumerate(gradients):
                self._update(index, gradient, rate)
        lengths = torch.stack([gradient.norm() for gradient in gradients]) if norm else None
        return loss.detach(), None if lengths is None else lengths.norm()

    def _loss(self, parameters: list[Tensor], rows_B: Tensor) -> Tensor:
        network, samples = self.network, self.samples
        layers, table_RD = parameters[:-1], parameters[-1]
        starts_F = torch.tensor([sum(network.rows[:feature]) for feature in range(len(network.rows))])
        pooled_FBD = table_RD[samples.ids_FN[:, rows_B] + starts_F[:, None].to(rows_B.device)]
        x_BI = samples.dense_ND[rows_B]
        for index in range(0, len(network.bottom), 2):
            x_BI = F.linear(x_BI, *layers[index : index + 2]).relu()
        if network.dot:
            x_BI, _ = dot.forward(x_BI, pooled_FBD, diagonal=network.diagonal)
        else:
            x_BI = torch.cat([x_BI, *pooled_FBD], dim=1)
        for index in range(len(network.bottom), len(layers), 2):
            x_BI = F.linear(x_BI, *layers[index : index + 2])
            x_BI = x_BI.relu() if index + 2 < len(layers) else x_BI
        return F.binary_cross_entropy_with_logits(x_BI.squeeze(1), samples.labels_N[rows_B])

    def _update(self, index: int, gradient: Tensor, rate: float) -> None:
        network = self.network
        parameter, mean, square = (one[index] for one in (network.parameters, network.means, network.squares))
        decay, steps = network.decays[index == len(network.means) - 1], float(network.steps)
        mean_correction, square_correction = (1 - beta**steps for beta in network.betas)
        parameter *= 1 - rate * decay
        mean += (1 - network.betas[0]) * (gradient - mean)
        square += (1 - network.betas[1]) * (gradient * gradient - square)
        parameter -= rate / mean_correction * mean / ((square / square_correction).sqrt() + network.eps)
