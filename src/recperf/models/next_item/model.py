"""A model of the next item: tokens of items (and of positions with hstu), the blocks of an encoder, and a user vector
whose cosine with an item's embedding is the item's score.

Dropout and drawn negatives come from torch's own generators, whose state a checkpoint holds.

Shapes: B sequences, L positions of a padded one, T positions of all sequences, D width, I items, K drawn, N items to
look up, V values of items' features, F most values of an item.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.batch import JaggedFeatures
from ...data.events.item_table import ItemValues
from ...data.next_item_batches import SequenceBatch
from ...measure.spans import span
from ...ops.hstu_attention.reference import bucket_starts
from ..init import normal_
from ..tables import SparseTables
from .config import NextItemConfig
from .counting import Counting
from .dropout import EPS, STD, dropped
from .hstu import HSTUBlock
from .softmax import full_loss, sampled_loss
from .transformer import TransformerBlock, buckets

ENCODERS: dict[str, type[HSTUBlock | TransformerBlock]] = {"hstu": HSTUBlock, "transformer": TransformerBlock}
BLOCK = 1 << 18
"""Rows outside the device that are read at a time."""


class CatalogueShards(Protocol):
    """The rows of items of this rank, and messages to the others."""

    begin: int
    stop: int
    skipped: int
    """Own rows before those of items."""

    def part(self, whole_ID: Tensor) -> Tensor: ...

    def whole(self, own_ND: Tensor) -> Tensor: ...

    def lookup(self, own_ND: Tensor, rows_T: Tensor) -> Tensor: ...

    def loss(
        self, users_TD: Tensor, vectors_ND: Tensor, targets_T: Tensor, weights_T: Tensor, temperature: float
    ) -> Tensor: ...


class NextItemModel(nn.Module):
    """Item 0 is padding; it is scored like any other, and callers pass over it. An item's embedding is its own row plus
    those of its features, in the tokens and in the scores. With `rows`, a table of items of which only the rows that a
    step uses are updated, a batch has these items, some of them drawn."""

    def __init__(
        self,
        config: NextItemConfig,
        *,
        seed: int,
        device: torch.device,
        values: ItemValues | None = None,
        rows: SparseTables | None = None,
        low: bool = False,
    ) -> None:
        """`low`: the products of the blocks have bfloat16 inputs, on a GPU those with the whole catalogue too."""
        super().__init__()
        self.config, self.items, self.low = config, rows, low
        if rows is None:
            self.items_ID = nn.Parameter(torch.empty(config.items + 1, config.dim, device=device))
        self.reset(seed)
        encoder = ENCODERS[config.encoder]
        self.positions_ND: nn.Parameter | None = None
        if encoder.positions:
            self.positions_ND = nn.Parameter(torch.empty(config.max_length, config.dim, device=device))
            # Items are multiplied by the root of the width, so that both are of one size.
            normal_(self.positions_ND, math.sqrt(1 / config.dim), seed, "positions")
        self.features_VD: nn.Parameter | None = None
        if config.feature_rows:
            assert values is not None
            self.features_VD = nn.Parameter(torch.empty(config.feature_rows, config.dim, device=device))
            normal_(self.features_VD, STD, seed, "features")
            self.values_IF = torch.from_numpy(values.rows_IK).to(device)
            self.weights_IF = torch.from_numpy(values.weights_IK).to(device)
        self.blocks = nn.ModuleList(
            encoder(config, device, seed, f"blocks.{number}") for number in range(config.blocks)
        )
        self.final_norm = nn.LayerNorm(config.dim, eps=EPS, device=device) if encoder.normed else nn.Identity()
        self.counting: Counting | None = None
        """What counting adds to the scores; None: nothing."""
        self.exchange: Callable[[], None] = lambda: None
        """Puts averages of the weights in their place, or the weights back: an evaluation has averages."""
        self.starts_K = bucket_starts(config.time_buckets, device)[:-1] if config.time_buckets else None
        self.shards: CatalogueShards | None = None
        """How ranks share the rows of items; None: all of them are here."""
        self._gathered_ID: Tensor | None = None
        """The rows of all ranks during an evaluation."""

    def divide(self, shards: CatalogueShards) -> None:
        """Keep only the rows of items that are this rank's."""
        self.shards, self.items_ID = shards, nn.Parameter(shards.part(self.items_ID.detach()))

    def train(self, mode: bool = True) -> NextItemModel:
        if mode != self.training:
            self.exchange()
            self._gathered_ID = None
        return super().train(mode)

    def reset(self, seed: int) -> None:
        """Draw the initial rows of items."""
        if self.items is None:
            normal_(self.items_ID, STD, seed, "items")
        else:
            self.items.reset(STD, seed)

    def encode(self, batch: SequenceBatch, items_TD: Tensor | None = None) -> Tensor:
        """The user vector after every position, of length 1; `items_TD` are embeddings that were looked up."""
        config = self.config
        with span("tokens"):
            items_TD = self.embedded(batch.items_T) if items_TD is None else items_TD
            x_TD = items_TD * math.sqrt(config.dim)
            if self.positions_ND is not None:
                x_TD = x_TD + F.embedding(batch.positions_T, self.positions_ND)
            x_TD = dropped(x_TD, config.dropout, self.training, batch)
        bias = ENCODERS[config.encoder].bias_input(batch, self.starts_K)
        # Without its cache of converted weights, which a CUDA graph would hold on to.
        with torch.autocast(x_TD.device.type, torch.bfloat16, enabled=self.low, cache_enabled=False):
            for block in self.blocks:
                x_TD = block(x_TD, batch, bias)
        return F.normalize(self.final_norm(x_TD), dim=1, eps=EPS)

    def loss(self, batch: SequenceBatch) -> Tensor:
        """The mean softmax loss of the next item over all positions."""
        config, targets_T, drawn_K, items_TD = self.config, batch.targets_T, batch.drawn_K, None
        vectors_ID = None
        if config.full_softmax and batch.features is not None:
            with span("tokens"):
                every_ID = self.embedded(None, batch.features)
                items_TD, vectors_ID = F.embedding(batch.items_T, every_ID), F.normalize(every_ID[1:], dim=1, eps=EPS)
        elif drawn_K is not None:
            with span("tokens"):
                every_ND = self.embedded(torch.cat([batch.items_T, drawn_K, targets_T]), batch.features)
                items_TD, scored_ND = every_ND.tensor_split([len(targets_T)])
        users_TD = self.encode(batch, items_TD)
        with span("softmax"):
            if self.shards is not None:
                return self._shared_loss(self.shards, users_TD, batch)
            if config.full_softmax:
                vectors_ID = self.item_vectors() if vectors_ID is None else vectors_ID
                return full_loss(users_TD, vectors_ID, targets_T - 1, config.temperature, batch.weights_T, low=self.low)
            if drawn_K is None:
                drawn_K = torch.randint(1, config.items + 1, (config.negatives,), device=targets_T.device)
                scored_ND = self.embedded(torch.cat([drawn_K, targets_T]))
            vectors = F.normalize(scored_ND, dim=1, eps=EPS)
            drawn_KD, owns_TD = torch.split(vectors, [len(drawn_K), len(targets_T)])
            same_TK = targets_T[:, None] == drawn_K
            return sampled_loss(users_TD, owns_TD, drawn_KD, same_TK, config.temperature, batch.weights_T)

    def embedded(self, items_N: Tensor | None = None, features: JaggedFeatures | None = None) -> Tensor:
        """The embeddings of items; None: of all. `features` are the same items, whose rows are to be trained."""
        rows_ND = self._looked_up(self.items, items_N, features) if self.items is not None else self._rows(items_N)
        return self._with_features(rows_ND, slice(None) if items_N is None else items_N)

    def _rows(self, items_N: Tensor | None) -> Tensor:
        rows_ID: Tensor = self.items_ID
        if self.shards is not None:
            if torch.is_grad_enabled() and items_N is not None:
                return self.shards.lookup(rows_ID, items_N)
            if self._gathered_ID is None:
                self._gathered_ID = self.shards.whole(rows_ID)
            rows_ID = self._gathered_ID
        return rows_ID if items_N is None else F.embedding(items_N, rows_ID)

    def _shared_loss(self, shards: CatalogueShards, users_TD: Tensor, batch: SequenceBatch) -> Tensor:
        """The mean over all positions of the batch, of which this rank has some, with the items of all ranks."""
        assert batch.weights_T is not None
        self._gathered_ID = None
        own_ND = self._with_features(self.items_ID, slice(shards.begin, shards.stop))
        vectors_ND = F.normalize(own_ND[shards.skipped :], dim=1, eps=EPS)
        weights_T = (batch.weights_T > 0) / (batch.whole or len(batch.weights_T))
        return shards.loss(users_TD, vectors_ND, batch.targets_T - 1, weights_T, self.config.temperature)

    def _with_features(self, rows_ND: Tensor, every: slice | Tensor) -> Tensor:
        if self.features_VD is None:
            return rows_ND
        weights_NF = self.weights_IF[every]
        return rows_ND + F.embedding_bag(
            self.values_IF[every], self.features_VD, mode="sum", per_sample_weights=weights_NF
        )

    def _looked_up(self, rows: SparseTables, items_N: Tensor | None, features: JaggedFeatures | None) -> Tensor:
        if items_N is None and features is None:
            if rows.tiers is None:
                return rows.table_RD
            every = torch.split(torch.arange(self.config.items + 1, device=rows.table_RD.device), BLOCK)
            return torch.cat([self._looked_up(rows, part_N, None) for part_N in every])
        if features is None:
            assert items_N is not None
            return rows.record(JaggedFeatures.from_ids(rows.keys, items_N[None]))[0][0]
        pooled_1ND, saved = rows.record(features)
        rows_ND = pooled_1ND[0].requires_grad_(not rows.frozen)
        if not rows.frozen:
            rows_ND.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient_ND: rows.backward(saved, features, gradient_ND[None])
            )
        return rows_ND

    def item_vectors(self) -> Tensor:
        """The vectors of items 1 and up, of length 1."""
        return F.normalize(self.embedded()[1:], dim=1, eps=EPS)

    def scored(self, products_BI: Tensor, batch: SequenceBatch) -> Tensor:
        """What items are ranked by, from the products of their vectors and those of users."""
        logits_BI = products_BI / self.config.temperature
        return logits_BI if self.counting is None else self.counting(logits_BI, batch)

    def last(self, batch: SequenceBatch) -> Tensor:
        """The user vector after the last position of each sequence; no sequence may be empty."""
        return self.encode(batch)[batch.offsets_B1[1:] - 1]

    def forget_gradients(self) -> None:
        self.zero_grad(set_to_none=True)
        if self.items is not None:
            self.items.forget()


class PaddedModel(nn.Module):
    """Takes rows of the table of items, the oldest first; what follows the `lengths_B` items of a row is ignored."""

    starts_K: Tensor
    back_LL: Tensor

    def __init__(self, model: NextItemModel) -> None:
        super().__init__()
        self.config, self.positions_LD = model.config, model.positions_ND
        self.items_ID = nn.Parameter(model.embedded().detach())
        self.blocks, self.final_norm = model.blocks, model.final_norm
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
        x_BLD = F.embedding(rows_BL, self.items_ID) * math.sqrt(self.config.dim)
        if self.positions_LD is not None:
            x_BLD = x_BLD + self.positions_LD
        buckets_BLL = None
        if times_BL is not None and query_times_BL is not None:
            buckets_BLL = buckets(times_BL, query_times_BL, self.starts_K)
        for block in self.blocks:
            x_BLD = block.padded(x_BLD, self.back_LL, buckets_BLL)  # type: ignore[operator]
        last_B1D = (lengths_B - 1)[:, None, None].expand(-1, 1, self.config.dim)
        return F.normalize(self.final_norm(x_BLD.gather(1, last_B1D).squeeze(1)), dim=1, eps=EPS)
