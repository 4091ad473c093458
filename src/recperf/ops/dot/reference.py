"""The dot interaction in plain torch: short, and what the other implementations must equal.

Shapes: B samples, F sparse vectors, V = F + 1 vectors (the dense one first), D width, P pairs, W = D + P.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def pairs(vectors: int, diagonal: bool, device: torch.device) -> Tensor:
    """Places of the pairs in the flattened V x V products: the lower triangle, row by row; kept, not rebuilt a step."""
    rows, columns = torch.tril_indices(vectors, vectors, offset=0 if diagonal else -1, device=device)
    return rows * vectors + columns


def forward(dense_BD: Tensor, sparse_FBD: Tensor, *, diagonal: bool) -> Tensor:
    """The dense vector, then the dot products of all pairs."""
    stacked_BVD = _stacked(dense_BD, sparse_FBD)
    products_BVV = torch.bmm(stacked_BVD, stacked_BVD.transpose(1, 2))
    places_P = pairs(stacked_BVD.shape[1], diagonal, dense_BD.device)
    return torch.cat([dense_BD, products_BVV.flatten(1).index_select(1, places_P).to(dense_BD.dtype)], dim=1)


def backward(dense_BD: Tensor, sparse_FBD: Tensor, gradient_BW: Tensor, *, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the dense vector and of the sparse ones."""
    stacked_BVD = _stacked(dense_BD, sparse_FBD)
    batch, vectors, dim = stacked_BVD.shape
    square = stacked_BVD.new_zeros(batch, vectors * vectors)
    places_P = pairs(vectors, diagonal, dense_BD.device)
    square.index_copy_(1, places_P, gradient_BW[:, dim:].to(square.dtype))
    square_BVV = square.view(batch, vectors, vectors)
    # A product belongs to both of its vectors: the pair (i, j) sends the other one's value to each.
    given_BVD = torch.bmm(square_BVV + square_BVV.transpose(1, 2), stacked_BVD)
    dense = (gradient_BW[:, :dim] + given_BVD[:, 0]).to(dense_BD.dtype)
    return dense, given_BVD[:, 1:].transpose(0, 1).contiguous()


def _stacked(dense_BD: Tensor, sparse_FBD: Tensor) -> Tensor:
    return torch.cat([dense_BD.unsqueeze(0).to(sparse_FBD.dtype), sparse_FBD]).transpose(0, 1).contiguous()
