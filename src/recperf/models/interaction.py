"""How the dense vector and the sparse vectors of a sample meet.

Shapes: B samples, V vectors a sample (the dense one first), D width, P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Concat(nn.Module):
    """All vectors side by side, the dense one first."""

    def forward(self, dense_BD: Tensor, sparse: list[Tensor]) -> Tensor:
        return torch.cat([dense_BD, *sparse], dim=1)


class Dot(nn.Module):
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
