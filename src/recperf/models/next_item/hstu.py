"""HSTU blocks: SiLU attention with a learned bias by distance and by time, gated, in one residual step.

Shapes: B sequences, L positions of a padded one, T positions of all sequences, D width, H heads, A width of a head,
E = H * A, P distances, K time buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.next_item_batches import SequenceBatch
from ...measure.spans import span
from ...ops import hstu_attention
from ...ops.hstu_attention import Mask, RelativeBias
from ...ops.layer_norm import layer_norm
from ..init import normal_, xavier_uniform_
from .config import NextItemConfig
from .dropout import EPS, STD, dropped


class HSTUBlock(nn.Module):
    """Gates the normalised attention of the positions before, and adds the result to its input."""

    normed = False
    """Whether its last output is normalised by a layer norm with weights."""
    positions = True
    """Whether learned vectors of positions are added to the tokens."""

    def __init__(self, config: NextItemConfig, device: torch.device, seed: int, name: str) -> None:
        super().__init__()
        self.config = config
        dim, width = config.dim, config.width
        self.uvqk_DF = nn.Parameter(torch.empty(dim, 4 * width, device=device))
        self.output_ED = nn.Parameter(torch.empty(width, dim, device=device))
        self.output_bias_D = nn.Parameter(torch.zeros(dim, device=device))
        self.distances_P = nn.Parameter(torch.empty(config.max_length, device=device))
        self.buckets_K = nn.Parameter(torch.empty(config.time_buckets, device=device)) if config.time_buckets else None
        normal_(self.uvqk_DF, STD, seed, f"{name}.uvqk")
        normal_(self.distances_P, STD, seed, f"{name}.distances")
        if self.buckets_K is not None:
            normal_(self.buckets_K, STD, seed, f"{name}.buckets")
        xavier_uniform_(self.output_ED, seed, f"{name}.output")

    @staticmethod
    def bias_input(batch: SequenceBatch, starts_K: Tensor | None) -> None:
        """The attention reads times from the batch itself."""

    def forward(self, x_TD: Tensor, batch: SequenceBatch, _: None = None) -> Tensor:
        config = self.config
        with span("stu_input"):
            normed_TD = layer_norm(x_TD, None, None, EPS)
            u_TE, v_TE, q_TE, k_TE = torch.split(F.silu(normed_TD @ self.uvqk_DF), config.width, 1)
        with span("attention"):
            q_THA, k_THA, v_THA = (x_TE.view(-1, config.heads, config.head_dim) for x_TE in (q_TE, k_TE, v_TE))
            mask = Mask(alpha=1.0, length=config.max_length, longest=batch.longest)
            timed = self.buckets_K is not None and batch.times_T is not None
            by_time = (self.buckets_K, batch.times_T, batch.next_times_T) if timed else ()
            bias = RelativeBias(self.distances_P, *by_time)
            attended_THA = hstu_attention.attention(q_THA, k_THA, v_THA, batch.offsets_B1, mask, bias=bias)
        with span("stu_output"):
            gated_TE = u_TE * layer_norm(attended_THA.flatten(1), None, None, EPS)
            dropped_TE = dropped(gated_TE, config.dropout, self.training, batch)
            return torch.addmm(self.output_bias_D, dropped_TE, self.output_ED).add_(x_TD)

    def padded(self, x_BLD: Tensor, back_LL: Tensor, buckets_BLL: Tensor | None) -> Tensor:
        """The same on padded sequences: `back_LL` is how far each position lies behind another."""
        config, heads = self.config, (self.config.heads, self.config.head_dim)
        normed_BLD = F.layer_norm(x_BLD, (config.dim,), eps=EPS)
        u_BLE, v_BLE, q_BLE, k_BLE = torch.split(F.silu(normed_BLD @ self.uvqk_DF), config.width, 2)
        q_BHLA, k_BHLA, v_BHLA = (one.reshape(*one.shape[:2], *heads).transpose(1, 2) for one in (q_BLE, k_BLE, v_BLE))
        scores_BHLL = q_BHLA @ k_BHLA.transpose(2, 3) + self.distances_P[back_LL.clamp(min=0)]
        if buckets_BLL is not None and self.buckets_K is not None:
            scores_BHLL = scores_BHLL + self.buckets_K[buckets_BLL][:, None]
        weights_BHLL = torch.where(back_LL >= 0, F.silu(scores_BHLL) / config.max_length, 0.0)
        attended_BLE = (weights_BHLL @ v_BHLA).transpose(1, 2).flatten(2)
        gated_BLE = u_BLE * F.layer_norm(attended_BLE, (config.width,), eps=EPS)
        return x_BLD + gated_BLE @ self.output_ED + self.output_bias_D
