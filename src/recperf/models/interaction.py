"""The interaction of the dense vector and the sparse vectors of a sample.

Shapes: B samples, F sparse features, V vectors a sample (the dense one first), D width, P pairs, W output width,
N = (F + 1) x D all vectors side by side, K rank of a cross layer.

`record` and `backward` compute the same as `forward` and autograd, written out for the explicit training step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.dot import reference
from .init import normal_
from .mlp import add_gradient


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


Layer = tuple[nn.Parameter, nn.Parameter, nn.Parameter]
Saved = tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]
"""The sparse vectors, then for each layer its input, that after `down`, and that after `up` with the bias."""


class LowRankCross(Interaction):
    """The concatenated vectors, the dense one first, through the cross layers; the output is as wide as the input.

    The low-rank cross network of DCNv2: each layer multiplies its input by the first one once more.

        x_0 = the vectors side by side;  x_l+1 = x_0 * (up_l (down_l x_l) + bias_l) + x_l
    """

    def __init__(self, width: int, *, layers: int, rank: int) -> None:
        super().__init__()
        self.together = Concat()
        self.down_KN = nn.ParameterList(nn.Parameter(torch.empty(rank, width)) for _ in range(layers))
        self.up_NK = nn.ParameterList(nn.Parameter(torch.empty(width, rank)) for _ in range(layers))
        self.bias_N = nn.ParameterList(nn.Parameter(torch.empty(width)) for _ in range(layers))

    @property
    def layers(self) -> list[Layer]:
        return list(zip(self.down_KN, self.up_NK, self.bias_N))

    def reset(self, seed: int) -> None:
        """Draw weights from N(0, 2 / (in + out)); biases start at 0."""
        for index, (down_KN, up_NK, bias_N) in enumerate(self.layers):
            std = math.sqrt(2 / sum(down_KN.shape))
            normal_(down_KN, std, seed, f"cross.{index}.down")
            normal_(up_NK, std, seed, f"cross.{index}.up")
            nn.init.zeros_(bias_N)

    def forward(self, dense_BD: Tensor, sparse: list[Tensor]) -> Tensor:
        first_BN: Tensor = self.together(dense_BD, sparse)
        x_BN = first_BN
        for down_KN, up_NK, bias_N in self.layers:
            x_BN = first_BN * F.linear(F.linear(x_BN, down_KN), up_NK, bias_N) + x_BN
        return x_BN

    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Saved]:
        # The cross layers have the type of the tables, also where the MLPs are computed in bfloat16.
        first_BN, _ = self.together.record(dense_BD, sparse_FBD)
        x_BN, passed = first_BN, []
        for down_KN, up_NK, bias_N in self.layers:
            low_BK = x_BN.mm(down_KN.t())
            factor_BN = torch.addmm(bias_N, low_BK, up_NK.t())
            passed.append((x_BN, low_BK, factor_BN))
            x_BN = torch.addcmul(x_BN, first_BN, factor_BN)
        return x_BN, (sparse_FBD, passed)

    def backward(self, saved: Saved, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the dense vector and of the sparse ones, F x B x D; add those of the layers."""
        sparse_FBD, passed = saved
        first_BN = passed[0][0]
        gradient_BN = gradient_BW.to(first_BN.dtype)
        first_gradient_BN = torch.zeros_like(first_BN)
        for (down_KN, up_NK, bias_N), (x_BN, low_BK, factor_BN) in zip(reversed(self.layers), reversed(passed)):
            first_gradient_BN.addcmul_(gradient_BN, factor_BN)
            factor_gradient_BN = gradient_BN * first_BN
            low_gradient_BK = factor_gradient_BN.mm(up_NK)
            add_gradient(bias_N, factor_gradient_BN.sum(0))
            add_gradient(up_NK, factor_gradient_BN.t().mm(low_BK))
            add_gradient(down_KN, low_gradient_BK.t().mm(x_BN))
            gradient_BN = torch.addmm(gradient_BN, low_gradient_BK, down_KN)
        return self.together.backward(sparse_FBD, first_gradient_BN.add_(gradient_BN))
