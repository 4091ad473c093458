"""How the dense vector and the sparse vectors of a sample meet.

Shapes: B samples, F sparse features, V vectors a sample (the dense one first), D width, P pairs, W output width.

`record` and `backward` are the same arithmetic as `forward`, written out for the explicit training step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.dot import reference


class Interaction(nn.Module, ABC):
    """The seam: what a model asks of its interaction."""

    def reset(self, seed: int) -> None:
        """Initial weights, where it has some."""

    @abstractmethod
    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Any]:
        """The output, B x W, and what `backward` needs."""

    @abstractmethod
    def backward(self, saved: Any, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the dense vector and of the sparse ones, F x B x D."""


class Concat(Interaction):
    """All vectors side by side, the dense one first."""

    def forward(self, dense_BD: Tensor, sparse: list[Tensor]) -> Tensor:
        return torch.cat([dense_BD, *sparse], dim=1)

    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what `backward` needs."""
        return torch.cat([dense_BD.float(), *sparse_FBD.unbind(0)], dim=1), sparse_FBD

    def backward(self, saved: Tensor, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the dense vector and of the sparse ones, F x B x D."""
        features, batch, dim = saved.shape
        gradient_BW = gradient_BW.float()
        dense = gradient_BW.shape[1] - features * dim
        return gradient_BW[:, :dense], gradient_BW[:, dense:].view(batch, features, dim).transpose(0, 1).contiguous()


class Dot(Interaction):
    """The dense vector, then the dot products of all pairs: the lower triangle, row by row.

    Pairs come as (1,0), (2,0), (2,1), (3,0) ...; with `diagonal` each row ends with the vector's product with itself.
    """

    def __init__(self, vectors: int, *, diagonal: bool, body: ModuleType = reference) -> None:
        super().__init__()
        self.vectors, self.diagonal, self.body = vectors, diagonal, body
        """The body is one of `ops.dot`'s."""
        self.width: int | None = None
        """Fill the written-out step's output with zeros up to this, where a product wants even widths."""

    def forward(self, dense_BD: Tensor, sparse: list[Tensor]) -> Tensor:
        """By torch's own operators, for autograd."""
        met_BW, _ = reference.forward(dense_BD, torch.stack(sparse), diagonal=self.diagonal)
        return met_BW

    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Any]:
        """The output, and what `backward` needs."""
        met: tuple[Tensor, Any] = self.body.forward(dense_BD, sparse_FBD, diagonal=self.diagonal, width=self.width)
        return met

    def backward(self, saved: Any, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the dense vector and of the sparse ones, F x B x D."""
        given: tuple[Tensor, Tensor] = self.body.backward(saved, gradient_BW, diagonal=self.diagonal)
        return given
