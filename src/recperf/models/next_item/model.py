"""HSTU for next-item recommendation: tokens of items and positions, blocks with SiLU attention, and a user vector whose
cosine with an item's embedding is the item's score.

Dropout and drawn negatives come from torch's own generators, whose state a checkpoint holds.

Shapes: B sequences, T positions of all sequences, D width, H heads, A width of a head, E = H * A, I items, K drawn, N
items to look up, W positions of the whole batch, V values of items' features, F most values of an item.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.next_item_batches import SequenceBatch
from ...data.yambda.item_features import ItemValues
from ...measure.spans import span
from ...ops import hstu_attention
from ...ops.hstu_attention import Mask, RelativeBias
from ..init import normal_, xavier_uniform_
from .config import NextItemConfig
from .softmax import full_loss, sampled_loss

EPS = 1e-6
STD = 0.02


def dropped(x_TD: Tensor, share: float, training: bool, batch: SequenceBatch) -> Tensor:
    """Dropout. Ranks draw for the whole batch, so that their generators stay alike, and use what is for their part: on
    a CPU what a single process draws."""
    if batch.whole is None or not training or not share:
        return F.dropout(x_TD, share, training)
    scales_WD = x_TD.new_empty(batch.whole, x_TD.shape[1]).bernoulli_(1 - share).div_(1 - share)
    return x_TD * scales_WD[batch.numbers_T]


class Block(nn.Module):
    """Gates the normalised attention of the positions before, and adds the result to its input."""

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

    def forward(self, x_TD: Tensor, batch: SequenceBatch) -> Tensor:
        config = self.config
        with span("stu_input"):
            normed_TD = F.layer_norm(x_TD, (config.dim,), eps=EPS)
            u_TE, v_TE, q_TE, k_TE = torch.split(F.silu(normed_TD @ self.uvqk_DF), config.width, 1)
        with span("attention"):
            q_THA, k_THA, v_THA = (x_TE.view(-1, config.heads, config.head_dim) for x_TE in (q_TE, k_TE, v_TE))
            mask = Mask(alpha=1.0, length=config.max_length, longest=batch.longest)
            timed = self.buckets_K is not None and batch.times_T is not None
            by_time = (self.buckets_K, batch.times_T, batch.next_times_T) if timed else ()
            bias = RelativeBias(self.distances_P, *by_time)
            attended_THA = hstu_attention.attention(q_THA, k_THA, v_THA, batch.offsets_B1, mask, bias=bias)
        with span("stu_output"):
            gated_TE = u_TE * F.layer_norm(attended_THA.flatten(1), (config.width,), eps=EPS)
            dropped_TE = dropped(gated_TE, config.dropout, self.training, batch)
            return torch.addmm(self.output_bias_D, dropped_TE, self.output_ED).add_(x_TD)


class NextItemHSTU(nn.Module):
    """Item 0 is padding; it is scored like any other, and callers pass over it. An item's embedding is its own row plus
    those of its features, in the tokens and in the scores."""

    def __init__(
        self, config: NextItemConfig, *, seed: int, device: torch.device, values: ItemValues | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.items_ID = nn.Parameter(torch.empty(config.items + 1, config.dim, device=device))
        self.positions_ND = nn.Parameter(torch.empty(config.max_length, config.dim, device=device))
        normal_(self.items_ID, STD, seed, "items")
        normal_(self.positions_ND, math.sqrt(1 / config.dim), seed, "positions")
        self.features_VD: nn.Parameter | None = None
        if config.feature_rows:
            assert values is not None
            self.features_VD = nn.Parameter(torch.empty(config.feature_rows, config.dim, device=device))
            normal_(self.features_VD, STD, seed, "features")
            self.values_IF = torch.from_numpy(values.rows_IK).to(device)
            self.weights_IF = torch.from_numpy(values.weights_IK).to(device)
        self.blocks = nn.ModuleList(Block(config, device, seed, f"blocks.{number}") for number in range(config.blocks))

    def encode(self, batch: SequenceBatch) -> Tensor:
        """The user vector after every position, of length 1."""
        config = self.config
        with span("tokens"):
            x_TD = self.embedded(batch.items_T) * math.sqrt(config.dim)
            x_TD = x_TD + F.embedding(batch.positions_T, self.positions_ND)
            x_TD = dropped(x_TD, config.dropout, self.training, batch)
        for block in self.blocks:
            x_TD = block(x_TD, batch)
        return F.normalize(x_TD, dim=1, eps=EPS)

    def loss(self, batch: SequenceBatch) -> Tensor:
        """The mean softmax loss of the next item over all positions."""
        users_TD = self.encode(batch)
        config, targets_T = self.config, batch.targets_T
        with span("softmax"):
            if config.full_softmax:
                return full_loss(users_TD, self.item_vectors(), targets_T - 1, config.temperature, batch.weights_T)
            drawn_K = torch.randint(1, config.items + 1, (config.negatives,), device=targets_T.device)
            vectors = F.normalize(self.embedded(torch.cat([drawn_K, targets_T])), dim=1, eps=EPS)
            drawn_KD, owns_TD = torch.split(vectors, [len(drawn_K), len(targets_T)])
            same_TK = targets_T[:, None] == drawn_K
            return sampled_loss(users_TD, owns_TD, drawn_KD, same_TK, config.temperature, batch.weights_T)

    def embedded(self, items_N: Tensor | None = None) -> Tensor:
        """The embeddings of items; None: of all."""
        rows_ND = self.items_ID if items_N is None else F.embedding(items_N, self.items_ID)
        if self.features_VD is None:
            return rows_ND
        every = slice(None) if items_N is None else items_N
        weights_NF = self.weights_IF[every]
        return rows_ND + F.embedding_bag(
            self.values_IF[every], self.features_VD, mode="sum", per_sample_weights=weights_NF
        )

    def item_vectors(self) -> Tensor:
        """The vectors of items 1 and up, of length 1."""
        return F.normalize(self.embedded()[1:], dim=1, eps=EPS)

    def last(self, batch: SequenceBatch) -> Tensor:
        """The user vector after the last position of each sequence; no sequence may be empty."""
        return self.encode(batch)[batch.offsets_B1[1:] - 1]

    def forget_gradients(self) -> None:
        self.zero_grad(set_to_none=True)
