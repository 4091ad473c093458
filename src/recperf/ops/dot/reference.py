"""The dot interaction in plain torch: the definition that the other implementations must match.

Shapes: B samples, F sparse vectors, V = F + 1 vectors (the dense one first), D width, P pairs, W = D + P.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


@lru_cache(maxsize=64)
def pairs(vectors: int, diagonal: bool, device: torch.device) -> Tensor:
    """Indices of the pairs in the flattened V x V products: the lower triangle, row by row. Cached across steps."""
    rows, columns = torch.tril_indices(vectors, vectors, offset=0 if diagonal else -1, device=device)
    places: Tensor = rows * vectors + columns
    return places


def flops(sparse_FBD: Tensor) -> int:
    """Of the products of all pairs of vectors."""
    features, samples, dim = sparse_FBD.shape
    return samples * dim * features * (features + 1)


def forward(dense_BD: Tensor, sparse_FBD: Tensor, *, diagonal: bool, width: int | None = None) -> tuple[Tensor, Tensor]:
    """The dense vector, the dot products of all pairs, zeros up to `width`; and the tensors that `backward` needs."""
    stacked_BVD = _stacked(dense_BD, sparse_FBD)
    products_BVV = torch.bmm(stacked_BVD, stacked_BVD.transpose(1, 2))
    places_P = pairs(stacked_BVD.shape[1], diagonal, dense_BD.device)
    met_BP = products_BVV.flatten(1).index_select(1, places_P)
    met_BW = torch.cat([dense_BD, met_BP.to(dense_BD.dtype)], dim=1)
    return (met_BW if width is None else F.pad(met_BW, (0, width - met_BW.shape[1]))), stacked_BVD


def backward(saved: Tensor, gradient_BW: Tensor, *, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the dense vector and of the sparse ones, F x B x D."""
    batch, vectors, dim = saved.shape
    square = saved.new_zeros(batch, vectors * vectors)
    places_P = pairs(vectors, diagonal, saved.device)
    square.index_copy_(1, places_P, gradient_BW[:, dim : dim + len(places_P)].to(saved.dtype))
    square_BVV = square.view(batch, vectors, vectors)
    # A product belongs to both of its vectors: the pair (i, j) sends the other one's value to each.
    gradient_BVD = torch.bmm(square_BVV + square_BVV.transpose(1, 2), saved)
    dense_BD = gradient_BW[:, :dim] + gradient_BVD[:, 0]
    return dense_BD.to(gradient_BW.dtype), gradient_BVD[:, 1:].transpose(0, 1).contiguous()


def _stacked(dense_BD: Tensor, sparse_FBD: Tensor) -> Tensor:
    dense_1BD = dense_BD.unsqueeze(0).to(sparse_FBD.dtype)
    return torch.cat([dense_1BD, sparse_FBD]).transpose(0, 1).contiguous()
