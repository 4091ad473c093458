"""Transformer blocks: causal softmax attention and a gated feed-forward layer, each behind a layer norm and with a
residual connection.

Sequences are packed everywhere but in the attention, which takes less time than the rest.

Shapes: B sequences, L positions of a padded one, T positions of all sequences, D width, H heads, A width of a head,
E = H * A, F width of the feed-forward layer, K time buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.next_item_batches import SequenceBatch
from ...measure.spans import span
from ..init import normal_, xavier_uniform_
from .config import FEED_FORWARD, NextItemConfig
from .dropout import EPS, STD, dropped


class TransformerBlock(nn.Module):
    normed = True
    """Whether its last output is normalised by a layer norm with weights."""

    def __init__(self, config: NextItemConfig, device: torch.device, seed: int, name: str) -> None:
        super().__init__()
        self.config = config
        dim, width, hidden = config.dim, config.width, FEED_FORWARD * config.dim
        self.attention_norm, self.feed_norm = (nn.LayerNorm(dim, eps=EPS, device=device) for _ in range(2))
        shapes = {"qkv": (dim, 3 * width), "output": (width, dim), "gate": (dim, 2 * hidden), "down": (hidden, dim)}
        self.qkv_DF, self.output_ED, self.gate_DF, self.down_FD = (
            nn.Parameter(torch.empty(shape, device=device)) for shape in shapes.values()
        )
        for part, weight in zip(shapes, (self.qkv_DF, self.output_ED, self.gate_DF, self.down_FD)):
            xavier_uniform_(weight, seed, f"{name}.{part}")
        self.buckets_K = nn.Parameter(torch.empty(config.time_buckets, device=device)) if config.time_buckets else None
        if self.buckets_K is not None:
            normal_(self.buckets_K, STD, seed, f"{name}.buckets")

    @staticmethod
    def positions_std(config: NextItemConfig) -> float:
        return STD

    @staticmethod
    def bias_input(batch: SequenceBatch, starts_K: Tensor | None) -> Tensor | None:
        """The time bucket of each pair of a position and one before it; None where events have no times."""
        if starts_K is None or batch.times_T is None or batch.next_times_T is None:
            return None
        return buckets(batch.padded(batch.times_T), batch.padded(batch.next_times_T), starts_K)

    def forward(self, x_TD: Tensor, batch: SequenceBatch, buckets_BLL: Tensor | None = None) -> Tensor:
        config = self.config
        with span("attention_input"):
            qkv_TF = self.attention_norm(x_TD) @ self.qkv_DF
        with span("attention"):
            attended_TE = batch.packed(self._attended(batch.padded(qkv_TF), buckets_BLL))
        with span("attention_output"):
            x_TD = x_TD + dropped(attended_TE @ self.output_ED, config.dropout, self.training, batch)
        with span("feed_forward"):
            return x_TD + dropped(self._fed(x_TD), config.dropout, self.training, batch)

    def padded(self, x_BLD: Tensor, back_LL: Tensor, buckets_BLL: Tensor | None) -> Tensor:
        """The same on padded sequences."""
        x_BLD = x_BLD + self._attended(self.attention_norm(x_BLD) @ self.qkv_DF, buckets_BLL) @ self.output_ED
        return x_BLD + self._fed(x_BLD)

    def _attended(self, qkv_BLF: Tensor, buckets_BLL: Tensor | None) -> Tensor:
        heads = (self.config.heads, self.config.head_dim)
        q_BHLA, k_BHLA, v_BHLA = (
            one.reshape(*one.shape[:2], *heads).transpose(1, 2) for one in qkv_BLF.chunk(3, dim=2)
        )
        if buckets_BLL is None or self.buckets_K is None:
            attended_BHLA = F.scaled_dot_product_attention(q_BHLA, k_BHLA, v_BHLA, is_causal=True)
        else:
            later_LL = torch.ones_like(buckets_BLL[0], dtype=torch.bool).triu(1)
            bias_BLL = self.buckets_K[buckets_BLL].masked_fill(later_LL, -torch.inf)
            attended_BHLA = F.scaled_dot_product_attention(q_BHLA, k_BHLA, v_BHLA, attn_mask=bias_BLL[:, None])
        return attended_BHLA.transpose(1, 2).flatten(2)

    def _fed(self, x_D: Tensor) -> Tensor:
        """The gated feed-forward layer, of positions in any shape."""
        gate_F, up_F = (self.feed_norm(x_D) @ self.gate_DF).chunk(2, dim=-1)
        fed_D: Tensor = (F.silu(gate_F) * up_F) @ self.down_FD
        return fed_D


def buckets(times_BL: Tensor, next_times_BL: Tensor, starts_K: Tensor) -> Tensor:
    """The bucket of the time from each position to the item that follows another one."""
    seconds_BLL = (next_times_BL[:, :, None] - times_BL[:, None, :]).abs().clamp(min=1)
    return torch.bucketize(seconds_BLL, starts_K, right=True) - 1
