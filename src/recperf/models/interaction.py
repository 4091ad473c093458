"""How the dense vector and the sparse vectors of a sample meet.

Shapes: B samples, F sparse features, V vectors a sample (the dense one first), D width, P pairs, W output width.

`record` and `backward` are the same arithmetic as `forward`, written out for the explicit training step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


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
        return torch.cat([dense_BD, *sparse_FBD.unbind(0)], dim=1), sparse_FBD

    def backward(self, saved: Tensor, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the dense vector and of the sparse ones, F x B x D."""
        features, batch, dim = saved.shape
        dense = gradient_BW.shape[1] - features * dim
        return gradient_BW[:, :dense], gradient_BW[:, dense:].view(batch, features, dim).transpose(0, 1).contiguous()


class Dot(Interaction):
    """The dense vector, then the dot products of all pairs: the lower triangle, row by row.

    Pairs come as (1,0), (2,0), (2,1), (3,0) ...; with `diagonal` each row ends with the vector's product with itself.
    """

    def __init__(self, vectors: int, *, diagonal: bool) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(vectors, vectors, offset=0 if diagonal else -1)
        # Positions in the flattened V x V products, kept so that no step rebuilds them.
        self.register_buffer("pairs_P", rows * vectors + columns, persistent=False)
        self.pairs_P: Tensor

    def forward(self, dense_BD: Tensor, sparse: list[Tensor]) -> Tensor:
        stacked_BVD = torch.stack([dense_BD, *sparse], dim=1)
        products_BVV = torch.bmm(stacked_BVD, stacked_BVD.transpose(1, 2))
        return torch.cat([dense_BD, products_BVV.flatten(1).index_select(1, self.pairs_P)], dim=1)

    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what `backward` needs."""
        stacked_BVD = torch.cat([dense_BD.unsqueeze(0), sparse_FBD]).transpose(0, 1).contiguous()
        products_BVV = torch.bmm(stacked_BVD, stacked_BVD.transpose(1, 2))
        return torch.cat([dense_BD, products_BVV.flatten(1).index_select(1, self.pairs_P)], dim=1), stacked_BVD

    def backward(self, saved: Tensor, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the dense vector and of the sparse ones, F x B x D."""
        batch, vectors, dim = saved.shape
        square = gradient_BW.new_zeros(batch, vectors * vectors)
        square.index_copy_(1, self.pairs_P, gradient_BW[:, dim:])
        square_BVV = square.view(batch, vectors, vectors)
        # A product belongs to both of its vectors: the pair (i, j) sends the other one's value to each.
        stacked_BVD = torch.bmm(square_BVV + square_BVV.transpose(1, 2), saved)
        return gradient_BW[:, :dim] + stacked_BVD[:, 0], stacked_BVD[:, 1:].transpose(0, 1).contiguous()
