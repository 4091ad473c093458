"""The cross network of DCNv2 with low-rank matrices: each layer multiplies its input by the first one once more.

Shapes: B samples, F sparse features, D width of a vector, N = (F + 1) x D all vectors side by side, K rank.

    x_0 = the vectors side by side;  x_l+1 = x_0 * (up_l (down_l x_l) + bias_l) + x_l
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .init import normal_
from .interaction import Concat, Interaction
from .mlp import add_gradient

Layer = tuple[nn.Parameter, nn.Parameter, nn.Parameter]
Saved = tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]
"""The sparse vectors, then for each layer its input, that after `down`, and that after `up` with the bias."""


class LowRankCross(Interaction):
    """The concatenated vectors, the dense one first, through the cross layers; the output is as wide as the input."""

    def __init__(self, width: int, *, layers: int, rank: int) -> None:
        super().__init__()
        self.together = Concat()
        self.down_KN = nn.ParameterList(nn.Parameter(torch.empty(rank, width)) for _ in range(layers))
        self.up_NK = nn.ParameterList(nn.Parameter(torch.empty(width, rank)) for _ in range(layers))
        self.bias_N = nn.ParameterList(nn.Parameter(torch.empty(width)) for _ in range(layers))

    @property
    def layers(self) -> list[Layer]:
        """The parameters of each layer."""
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
