"""Loss functions: means over the samples of a batch.

Shapes: B samples. `slope` is the gradient of `value` with respect to the logits, written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Loss(Protocol):
    """`kind` and the `weights` of negatives and positives describe a loss to a kernel that computes it too."""

    kind: ClassVar[str]

    @property
    def weights(self) -> tuple[float, float]: ...

    def value(self, logits_B: Tensor, labels_B: Tensor) -> Tensor: ...

    def slope(self, logits_B: Tensor, labels_B: Tensor) -> Tensor: ...


class BCE:
    """Binary cross entropy of logits; large logits keep their gradient."""

    kind: ClassVar[str] = "bce"
    weights = (1.0, 1.0)

    def value(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits_B, labels_B)

    def slope(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        return logits_B.sigmoid().sub_(labels_B).div_(labels_B.shape[0])


@dataclass(frozen=True)
class WeightedBCE:
    """Binary cross entropy with a weight per label; the mean is over samples, not over weights."""

    kind: ClassVar[str] = "bce"
    negative: float
    positive: float

    @property
    def weights(self) -> tuple[float, float]:
        return self.negative, self.positive

    def _weights_of(self, labels_B: Tensor) -> Tensor:
        return torch.where(labels_B > 0.5, self.positive, self.negative).to(labels_B.dtype)

    def value(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits_B, labels_B, weight=self._weights_of(labels_B))

    def slope(self, logits_B: Tensor, labels_B: Tensor) -> Tensor:
        return BCE().slope(logits_B, labels_B).mul_(self._weights_of(labels_B))


class MSE:
    """The squared error of the probability, the default of the public DLRM."""

    kind: ClassVar[str] = "mse"
    weights = (1.0, 1.0)

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
