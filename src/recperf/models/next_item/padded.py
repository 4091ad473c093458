"""The encoder of NextItemHSTU on padded histories, in plain torch: what an export writes as a program.

Shapes: B histories, L items that the model reads, D width, H heads, A width of a head, E = H * A.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...ops.hstu_attention.reference import bucket_starts
from .model import EPS, Block, NextItemHSTU


class PaddedHSTU(nn.Module):
    """Takes rows of the table of items, the oldest first; what follows the `lengths_B` items of a row is ignored."""

    starts_K: Tensor
    back_LL: Tensor

    def __init__(self, model: NextItemHSTU) -> None:
        super().__init__()
        self.config, self.positions_LD = model.config, model.positions_ND
        self.items_ID = nn.Parameter(model.embedded().detach())
        self.blocks = model.blocks
        if self.config.time_buckets:
            self.register_buffer("starts_K", bucket_starts(self.config.time_buckets, self.items_ID.device)[:-1])
        places_L = torch.arange(self.config.max_length, device=self.items_ID.device)
        self.register_buffer("back_LL", places_L[:, None] - places_L)

    def forward(
        self,
        rows_BL: Tensor,
        lengths_B: Tensor,
        times_BL: Tensor | None = None,
        query_times_BL: Tensor | None = None,
    ) -> Tensor:
        """User vectors, of length 1."""
        x_BLD = F.embedding(rows_BL, self.items_ID) * math.sqrt(self.config.dim) + self.positions_LD
        buckets_BLL = None
        if times_BL is not None and query_times_BL is not None:
            seconds_BLL = (query_times_BL[:, :, None] - times_BL[:, None, :]).abs().clamp(min=1)
            buckets_BLL = torch.bucketize(seconds_BLL, self.starts_K, right=True) - 1
        for block in self.blocks:
            x_BLD = self._block(block, x_BLD, buckets_BLL)  # type: ignore[arg-type]
        last_B1D = (lengths_B - 1)[:, None, None].expand(-1, 1, self.config.dim)
        return F.normalize(x_BLD.gather(1, last_B1D).squeeze(1), dim=1, eps=EPS)

    def _block(self, block: Block, x_BLD: Tensor, buckets_BLL: Tensor | None) -> Tensor:
        config, heads = self.config, (self.config.heads, self.config.head_dim)
        normed_BLD = F.layer_norm(x_BLD, (config.dim,), eps=EPS)
        u_BLE, v_BLE, q_BLE, k_BLE = torch.split(F.silu(normed_BLD @ block.uvqk_DF), config.width, 2)
        q_BHLA, k_BHLA, v_BHLA = (one.reshape(*one.shape[:2], *heads).transpose(1, 2) for one in (q_BLE, k_BLE, v_BLE))
        scores_BHLL = q_BHLA @ k_BHLA.transpose(2, 3) + block.distances_P[self.back_LL.clamp(min=0)]
        if buckets_BLL is not None and block.buckets_K is not None:
            scores_BHLL = scores_BHLL + block.buckets_K[buckets_BLL][:, None]
        weights_BHLL = torch.where(self.back_LL >= 0, F.silu(scores_BHLL) / config.max_length, 0.0)
        attended_BLE = (weights_BHLL @ v_BHLA).transpose(1, 2).flatten(2)
        gated_BLE = u_BLE * F.layer_norm(attended_BLE, (config.width,), eps=EPS)
        return x_BLD + gated_BLE @ block.output_ED + block.output_bias_D
