"""Loss functions: means over the samples of a batch.

Shapes: B samples. `slope` is the gradient of `value` with respect to the logits, written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Loss(Protocol):
    def value(self, logits_B: Tensor, labels_B: Tensor) -> Tensor: ...

    def slope(self, logits_B: Tensor, labels_B: Tensor) -> Tensor: ...


class BCE:
    """Binary cross entropy of logits; large logits keep their gradient."""

    def value(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits_B, labels_B)

    def slope(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        return logits_B.sigmoid().sub_(labels_B).div_(labels_B.shape[0])


@dataclass(frozen=True)
class WeightedBCE:
    """Binary cross entropy with a weight per label; the mean is over samples, not over weights."""

    negative: float
    positive: float

    def weights(self, labels_B: Tensor) -> Tensor:
        return torch.where(labels_B > 0.5, self.positive, self.negative).to(labels_B.dtype)

    def value(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits_B, labels_B, weight=self.weights(labels_B))

    def slope(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        return BCE().slope(logits_B, labels_B).mul_(self.weights(labels_B))


class MSE:
    """The squared error of the probability, the default of the public DLRM."""

    def value(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        return F.mse_loss(logits_B.sigmoid(), labels_B)

    def slope(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        p_B = logits_B.sigmoid()
        return (p_B - labels_B).mul_(p_B).mul_(1 - p_B).mul_(2 / labels_B.shape[0])


def make(name: str, weights: tuple[float, float] = (1.0, 1.0)) -> Loss:
    """Create a loss by name; `weights` of negatives and positives apply to wbce."""
    if name == "wbce":
        return WeightedBCE(*weights)
    kinds: dict[str, type[BCE] | type[MSE]] = {"bce": BCE, "mse": MSE}
    return kinds[name]()
