"""Transformer blocks: causal softmax attention with rotary positions and a gated feed-forward layer, each behind a
layer norm and with a residual connection.

Sequences are packed everywhere but in the attention, which takes less time than the rest.

Shapes: B sequences, L positions of a padded one, T positions of all sequences, D width, H heads, A width of a head,
E = H * A, F width of the feed-forward layer, K time buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.next_item_batches import SequenceBatch
from ...measure.spans import span
from ...ops.layer_norm import layer_norm
from ...ops.padding import packed_heads, padded_heads, rotated
from ...ops.swiglu import swiglu
from ..init import normal_, xavier_uniform_
from .config import FEED_FORWARD, NextItemConfig
from .dropout import EPS, STD, dropped


class TransformerBlock(nn.Module):
    normed = True
    """Whether its last output is normalised by a layer norm with weights."""
    positions = False
    """Whether learned vectors of positions are added to the tokens."""

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
    def bias_input(batch: SequenceBatch, starts_K: Tensor | None) -> Pairs | None:
        """Pairs of a position and one before it; None where events have no times."""
        if starts_K is None or batch.times_T is None or batch.next_times_T is None:
            return None
        return Pairs(buckets(batch.padded(batch.times_T), batch.padded(batch.next_times_T), starts_K), len(starts_K))

    def forward(self, x_TD: Tensor, batch: SequenceBatch, pairs: Pairs | None = None) -> Tensor:
        config = self.config
        with span("attention_input"):
            qkv_TF = _normed(self.attention_norm, x_TD) @ self.qkv_DF
        with span("attention"):
            q_BHLA, k_BHLA, v_BHLA = padded_heads(qkv_TF, batch, heads=config.heads, parts=3, rotated=2)
            attended_TE = packed_heads(self._attended(q_BHLA, k_BHLA, v_BHLA, pairs), batch)
        with span("attention_output"):
            x_TD = x_TD + dropped(attended_TE @ self.output_ED, config.dropout, self.training, batch)
        with span("feed_forward"):
            fed_TD = swiglu(_normed(self.feed_norm, x_TD) @ self.gate_DF) @ self.down_FD
            added_TD: Tensor = x_TD + dropped(fed_TD, config.dropout, self.training, batch)
            return added_TD

    def padded(self, x_BLD: Tensor, back_LL: Tensor, buckets_BLL: Tensor | None) -> Tensor:
        """The same on padded sequences."""
        heads = (self.config.heads, self.config.head_dim)
        q_BHLA, k_BHLA, v_BHLA = (
            one_BLE.reshape(*one_BLE.shape[:2], *heads).transpose(1, 2)
            for one_BLE in (self.attention_norm(x_BLD) @ self.qkv_DF).chunk(3, dim=2)
        )
        pairs = None if buckets_BLL is None else Pairs(buckets_BLL, self.config.time_buckets)
        attended_BHLA = self._attended(rotated(q_BHLA), rotated(k_BHLA), v_BHLA, pairs)
        x_BLD = x_BLD + attended_BHLA.transpose(1, 2).flatten(2) @ self.output_ED
        gate_BLF, up_BLF = (self.feed_norm(x_BLD) @ self.gate_DF).chunk(2, dim=-1)
        out_BLD: Tensor = x_BLD + (F.silu(gate_BLF) * up_BLF) @ self.down_FD
        return out_BLD

    def _attended(self, q_BHLA: Tensor, k_BHLA: Tensor, v_BHLA: Tensor, pairs: Pairs | None) -> Tensor:
        if pairs is None or self.buckets_K is None:
            return F.scaled_dot_product_attention(q_BHLA, k_BHLA, v_BHLA, is_causal=True)
        later_LL = torch.ones_like(pairs.buckets_BLL[0], dtype=torch.bool).triu(1)
        bias_BLL = pairs.of(self.buckets_K).masked_fill(later_LL, -torch.inf)
        return F.scaled_dot_product_attention(q_BHLA, k_BHLA, v_BHLA, attn_mask=bias_BLL[:, None])


@dataclass(eq=False)
class Pairs:
    """The time bucket of each pair of positions, the same in all blocks."""

    buckets_BLL: Tensor
    buckets: int

    def of(self, values_K: Tensor) -> Tensor:
        """The value of each pair's bucket."""
        if not (values_K.is_cuda and values_K.requires_grad and torch.is_grad_enabled()):
            return values_K[self.buckets_BLL]
        values_BLL: Tensor = _OfBuckets.apply(values_K, self)  # type: ignore[no-untyped-call]
        return values_BLL

    @cached_property
    def by_bucket(self) -> tuple[Tensor, Tensor]:
        """The pairs in the order of their buckets, and where each bucket begins."""
        kind = torch.int16 if self.buckets <= torch.iinfo(torch.int16).max else torch.int32
        keys_P, order_P = torch.sort(self.buckets_BLL.flatten().to(kind), stable=True)
        numbers = torch.arange(self.buckets + 1, dtype=kind, device=keys_P.device)
        return order_P, torch.searchsorted(keys_P, numbers)

    def summed(self, grad_BLL: Tensor) -> Tensor:
        """The sum over each bucket's pairs, in a fixed order."""
        order_P, starts_K1 = self.by_bucket
        # The offsets need no check, for which the host would wait.
        return torch.segment_reduce(grad_BLL.flatten()[order_P], "sum", offsets=starts_K1, unsafe=True)


class _OfBuckets(torch.autograd.Function):
    """A bucket has up to millions of pairs: torch's own gradient of an index adds them one by one on a GPU."""

    @staticmethod
    def forward(ctx: Any, values_K: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return values_K[pairs.buckets_BLL]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.pairs.summed(grads[0]), None


def _normed(norm: nn.LayerNorm, x_TD: Tensor) -> Tensor:
    """In the type of the products that follow."""
    device = x_TD.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return layer_norm(x_TD, norm.weight, norm.bias, norm.eps, kind=kind)


def buckets(times_BL: Tensor, next_times_BL: Tensor, starts_K: Tensor) -> Tensor:
    """The bucket of the time from each position to the item that follows another one."""
    seconds_BLL = (next_times_BL[:, :, None] - times_BL[:, None, :]).abs().clamp(min=1)
    return torch.bucketize(seconds_BLL, starts_K, right=True) - 1
