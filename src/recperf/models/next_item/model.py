"""HSTU for next-item recommendation: tokens of items and positions, blocks with SiLU attention, and a user vector whose
cosine with an item's embedding is the item's score.

Dropout and drawn negatives come from torch's own generators, whose state a checkpoint holds.

Shapes: B sequences, T positions of all sequences, D width, H heads, A width of a head, E = H * A, I items, K drawn, N
items to look up, W positions of the whole batch, V values of items' features, F most values of an item.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.batch import JaggedFeatures
from ...data.events.item_features import ItemValues
from ...data.next_item_batches import SequenceBatch
from ...measure.spans import span
from ...ops import hstu_attention
from ...ops.catalogue_softmax import softmax_loss
from ...ops.hstu_attention import Mask, RelativeBias
from ...ops.hstu_attention.reference import bucket_starts
from ..init import normal_, xavier_uniform_
from ..tables import SparseTables
from .config import CHUNK, NextItemConfig

EPS = 1e-6
STD = 0.02
BLOCK = 1 << 18
"""Rows outside the device that are read at a time."""


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
    ) -> None:
        super().__init__()
        self.config, self.items = config, rows
        if rows is None:
            self.items_ID = nn.Parameter(torch.empty(config.items + 1, config.dim, device=device))
        self.reset(seed)
        self.positions_ND = nn.Parameter(torch.empty(config.max_length, config.dim, device=device))
        normal_(self.positions_ND, math.sqrt(1 / config.dim), seed, "positions")
        self.features_VD: nn.Parameter | None = None
        if config.feature_rows:
            assert values is not None
            self.features_VD = nn.Parameter(torch.empty(config.feature_rows, config.dim, device=device))
            normal_(self.features_VD, STD, seed, "features")
            self.values_IF = torch.from_numpy(values.rows_IK).to(device)
            self.weights_IF = torch.from_numpy(values.weights_IK).to(device)
        self.blocks = nn.ModuleList(Block(config, device, seed, f"blocks.{number}") for number in range(config.blocks))

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
            x_TD = x_TD + F.embedding(batch.positions_T, self.positions_ND)
            x_TD = dropped(x_TD, config.dropout, self.training, batch)
        for block in self.blocks:
            x_TD = block(x_TD, batch)
        return F.normalize(x_TD, dim=1, eps=EPS)

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
            if config.full_softmax:
                vectors_ID = self.item_vectors() if vectors_ID is None else vectors_ID
                return full_loss(users_TD, vectors_ID, targets_T - 1, config.temperature, batch.weights_T)
            if drawn_K is None:
                drawn_K = torch.randint(1, config.items + 1, (config.negatives,), device=targets_T.device)
                scored_ND = self.embedded(torch.cat([drawn_K, targets_T]))
            vectors = F.normalize(scored_ND, dim=1, eps=EPS)
            drawn_KD, owns_TD = torch.split(vectors, [len(drawn_K), len(targets_T)])
            same_TK = targets_T[:, None] == drawn_K
            return sampled_loss(users_TD, owns_TD, drawn_KD, same_TK, config.temperature, batch.weights_T)

    def embedded(self, items_N: Tensor | None = None, features: JaggedFeatures | None = None) -> Tensor:
        """The embeddings of items; None: of all. `features` are the same items, whose rows are to be trained."""
        if self.items is not None:
            rows_ND = self._looked_up(self.items, items_N, features)
        else:
            rows_ND = self.items_ID if items_N is None else F.embedding(items_N, self.items_ID)
        if self.features_VD is None:
            return rows_ND
        every = slice(None) if items_N is None else items_N
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

    def last(self, batch: SequenceBatch) -> Tensor:
        """The user vector after the last position of each sequence; no sequence may be empty."""
        return self.encode(batch)[batch.offsets_B1[1:] - 1]

    def forget_gradients(self) -> None:
        self.zero_grad(set_to_none=True)
        if self.items is not None:
            self.items.forget()


SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores held at a time: on a CPU few enough for its caches."""
MOST = 60.0
"""The largest score: the sum of the exponentials of a billion such scores is a number of float32."""


def full_loss(
    users_TD: Tensor, items_KD: Tensor, targets_T: Tensor, temperature: float, weights_T: Tensor | None = None,
    *, bounded: bool = True,
) -> Tensor:  # fmt: skip
    """The mean over positions of -log softmax(users . items / temperature) at the target, a row of the items; with
    `weights_T` the weighted sum. `bounded`: no product is above 1."""
    if len(users_TD) * len(items_KD) > CHUNK:
        return softmax_loss(
            users_TD, items_KD, targets_T, temperature=temperature, bounded=bounded, weights_T=weights_T
        )
    loss: Tensor = _Softmax.apply(users_TD, items_KD, targets_T, None, None, weights_T, temperature, bounded)  # type: ignore[no-untyped-call]
    return loss


def sampled_loss(
    users_TD: Tensor, owns_TD: Tensor, drawn_KD: Tensor, same_TK: Tensor, temperature: float,
    weights_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same over each position's own next item and drawn ones; a drawn item that is the own one does not count."""
    loss: Tensor = _Softmax.apply(users_TD, drawn_KD, None, owns_TD, same_TK, weights_T, temperature, True)  # type: ignore[no-untyped-call]
    return loss


class _Softmax(torch.autograd.Function):
    """Scores are cosines over the temperature, so that their exponentials need no shift: see MOST. Those against the
    whole catalogue may be others, which are shifted by the highest of their position."""

    @staticmethod
    def forward(
        ctx: Any,
        users_TD: Tensor,
        items_KD: Tensor,
        targets_T: Tensor | None,
        owns_TD: Tensor | None,
        same_TK: Tensor | None,
        weights_T: Tensor | None,
        temperature: float,
        bounded: bool,
    ) -> Tensor:
        if weights_T is None:
            weights_T = users_TD.new_full((len(users_TD),), 1 / max(1, len(users_TD)))
        weights_T1 = weights_T[:, None]
        total, sharp_TD = users_TD.new_zeros(()), users_TD / temperature
        d_users_TD, d_items_KD = torch.empty_like(users_TD), torch.zeros_like(items_KD)
        own_T1 = None if owns_TD is None else (sharp_TD * owns_TD).sum(1, keepdim=True)
        errors = []
        together = max(1, SCORES[users_TD.device.type] // len(items_KD))
        for first in range(0, len(users_TD), together):
            part = slice(first, first + together)
            sharp_CD, weights_C1 = sharp_TD[part], weights_T1[part]
            scores_CK = torch.mm(sharp_CD, items_KD.t())
            if targets_T is not None:
                targets_C1 = targets_T[part, None]
                if not bounded:
                    scores_CK -= scores_CK.amax(1, keepdim=True)
                own_C1 = scores_CK.gather(1, targets_C1)
                sum_C1 = scores_CK.exp_().sum(1, keepdim=True)
                scores_CK.scatter_add_(1, targets_C1, -sum_C1)
            else:
                assert same_TK is not None
                assert own_T1 is not None
                own_C1 = own_T1[part]
                scores_CK.masked_fill_(same_TK[part], -torch.inf)
                sum_C1 = scores_CK.exp_().sum(1, keepdim=True) + own_C1.exp()
                errors.append(own_C1.exp() / sum_C1 - 1)
            total += ((sum_C1.log() - own_C1) * weights_C1).sum()
            scales_C1 = weights_C1 / sum_C1
            torch.mm(scores_CK, items_KD, out=d_users_TD[part])
            d_users_TD[part] *= scales_C1
            d_items_KD.addmm_(scores_CK.t(), sharp_CD * scales_C1)
        gradients = [d_users_TD.div_(temperature), d_items_KD]
        if owns_TD is not None:
            error_T1 = torch.cat(errors) * weights_T1
            d_users_TD.addcmul_(error_T1 / temperature, owns_TD)
            gradients.append(error_T1 * sharp_TD)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_users_TD, d_items_KD, *d_owns = (gradient * grads[0] for gradient in ctx.saved_tensors)
        return d_users_TD, d_items_KD, None, d_owns[0] if d_owns else None, None, None, None, None


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
