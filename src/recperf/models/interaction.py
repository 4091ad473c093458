"""The interaction of the dense vector and the sparse vectors of a sample.

Shapes: B samples, F sparse features, V vectors a sample (the dense one first), D width, P pairs, W output width.

`record` and `backward` compute the same as `forward` and autograd, written out for the explicit training step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.dot import reference


class Interaction(nn.Module, ABC):
    """The interface between a model and its interaction."""

    def reset(self, seed: int) -> None:
        """Draw the initial weights, if there are any."""

    @abstractmethod
    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Any]:
        """Return the output, B x W, and what `backward` needs."""

    @abstractmethod
    def backward(self, saved: Any, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the dense vector and of the sparse ones, F x B x D."""


class Concat(Interaction):
    """All vectors concatenated, the dense one first."""

    def forward(self, dense_BD: Tensor, sparse: list[Tensor]) -> Tensor:
        return torch.cat([dense_BD, *sparse], dim=1)

    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([dense_BD.to(sparse_FBD.dtype), *sparse_FBD.unbind(0)], dim=1), sparse_FBD

    def backward(self, saved: Tensor, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        features, batch, dim = saved.shape
        gradient_BW = gradient_BW.to(saved.dtype)
        dense = gradient_BW.shape[1] - features * dim
        return gradient_BW[:, :dense], gradient_BW[:, dense:].view(batch, features, dim).transpose(0, 1).contiguous()


class Dot(Interaction):
    """The dense vector, then the dot products of all pairs: the lower triangle, row by row.

    Pairs come as (1,0), (2,0), (2,1), (3,0) ...; with `diagonal` each row ends with the vector's product with itself.
    `body` is one of the implementations in `ops.dot`.
    """

    def __init__(self, vectors: int, *, diagonal: bool, body: ModuleType = reference) -> None:
        super().__init__()
        self.vectors, self.diagonal, self.body = vectors, diagonal, body
        self.width: int | None = None
        """Pad the output of the written-out step with zeros to this width."""

    def forward(self, dense_BD: Tensor, sparse: list[Tensor]) -> Tensor:
        """Use torch's own operators, for autograd."""
        output_BW, _ = reference.forward(dense_BD, torch.stack(sparse), diagonal=self.diagonal)
        return output_BW

    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Any]:
        body = self._body(sparse_FBD)
        output_BW, saved = body.forward(dense_BD, sparse_FBD, diagonal=self.diagonal, width=self.width)
        return output_BW, (saved, body)

    def backward(self, saved: Any, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        products, body = saved
        gradients: tuple[Tensor, Tensor] = body.backward(products, gradient_BW, diagonal=self.diagonal)
        return gradients

    def _body(self, sparse_FBD: Tensor) -> ModuleType:
        """C and Triton compute in float32, which is not enough for float64."""
        return reference if sparse_FBD.dtype == torch.float64 else self.body
