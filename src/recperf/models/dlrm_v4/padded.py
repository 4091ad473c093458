"""The dense part of a trained DLRMv4 in plain torch, on histories padded to one length, which `torch.export` can trace.
Candidates may share a history: each of them is the last token of a row of its own.

A row has its context tokens, its history at the end of `length` places, and its candidate. Places before a history are
hidden from attention. Computes in float32, whatever the precision of training.

Shapes: B histories, L places for a history, C context tokens, T tokens of context and history, K candidates of a
history, W and D width of a table row and of a token, F running rates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.batch import HistoryBatch
from ...data.streaming.features import CANDIDATE, CROSSES, HISTORY
from ...ops.assemble import SHORTEST, UNIT
from .config import ACTIONS, EPS, FEATURE_TABLES, DLRMv4Config
from .hstu import HSTU, STULayer
from .model import DLRMv4, Encoder, RatesTower, time_features
from .tables import DLRMv4Tables


class PaddedDLRMv4(nn.Module):
    """Has the parameters of the model, under the same names."""

    content: Encoder
    extra: Encoder
    action: Encoder
    item_tower: Encoder
    head: Encoder
    rates: RatesTower
    recent: Encoder
    hstu: HSTU
    combine: nn.Linear
    combine_norm: nn.LayerNorm
    action_bits: nn.Parameter
    candidate_action: nn.Parameter
    context_weight: nn.Parameter
    context_bias: nn.Parameter
    position_weight: nn.Parameter
    time_weight: nn.Parameter

    def __init__(self, model: DLRMv4) -> None:
        super().__init__()
        self.config = model.config
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, part in model.named_children():
            if name != "tables":
                self.add_module(name, part)

    def forward(
        self,
        context_BCW: Tensor,
        item_BLW: Tensor,
        artist_BLW: Tensor,
        album_BLW: Tensor,
        candidate_BW3: Tensor,
        actions_BL: Tensor,
        times_BL: Tensor,
        lengths_B: Tensor,
        query_times_B: Tensor,
        rates_BF: Tensor | None = None,
    ) -> Tensor:
        """One logit per sample; with [B, K, ...] candidates and rates one for each of these."""
        config, single = self.config, candidate_BW3.dim() == 2
        candidate_BKW = candidate_BW3.unsqueeze(1) if single else candidate_BW3
        length, context, scale = times_BL.shape[1], config.context_tokens, config.scale
        positions_TD = self.position_weight[self.positions(length)]
        ages_BTD = self.time_weight[self.ages(times_BL, query_times_B)]
        context_CBD = torch.baddbmm(self.context_bias.unsqueeze(1), context_BCW.transpose(0, 1), self.context_weight)
        history_BLD = self.entity(item_BLW, artist_BLW, album_BLW) + self.actions(actions_BL)
        history_BTD = torch.cat([context_CBD.transpose(0, 1), history_BLD], 1) * scale
        history_BTD = history_BTD + positions_TD[:-1] + ages_BTD[:, :-1]
        candidate_BKD = self.entity(*torch.split(candidate_BKW, config.table_dim, 2))
        candidate_BKD = (candidate_BKD + encoded(self.action, self.candidate_action)) * scale
        candidate_BKD = candidate_BKD + positions_TD[-1] + ages_BTD[:, -1:]
        place_T = torch.arange(context + length, device=times_BL.device)
        there_BT = (place_T < context) | (place_T >= length + context - lengths_B.unsqueeze(1))
        fixed = config.hstu.attention_scale == "fixed"
        divisor = config.hstu.max_length if fixed else (lengths_B + context + 1).max()
        x_BTD, x_BKD = history_BTD, candidate_BKD
        for layer in self.hstu.layers:
            assert isinstance(layer, STULayer)
            x_BTD, x_BKD = stu(layer, x_BTD, x_BKD, there_BT, divisor)
        times_BKP = time_features(query_times_B).unsqueeze(1).expand(-1, x_BKD.shape[1], -1)
        user_BKD = self.combine_norm(self.combine(torch.cat([x_BKD, times_BKP], 2)))
        features = [user_BKD * encoded(self.item_tower, candidate_BKW)]
        if config.recent:
            # The newest first, with zeros where there are fewer.
            events_BND = (history_BTD * there_BT.unsqueeze(2))[:, context:].flip(1)[:, : config.recent]
            events_BND = F.pad(events_BND, (0, 0, 0, config.recent - events_BND.shape[1]))
            events_BKE = events_BND.flatten(1).unsqueeze(1).expand(-1, x_BKD.shape[1], -1)
            features.append(encoded(self.recent, torch.cat([candidate_BKD, events_BKE], 2)))
        logits_BK1 = encoded(self.head, torch.cat(features, 2))
        if rates_BF is not None:
            rates_BKF = rates_BF.unsqueeze(1) if single else rates_BF
            logits_BK1 = logits_BK1 + self.rates.linear(rates_BKF) + encoded(self.rates.encoder, rates_BKF)
            logits_BK1 = self.rates.blended(logits_BK1, rates_BKF)
        logits_BK = logits_BK1.squeeze(2)
        return logits_BK.squeeze(1) if single else logits_BK

    def entity(self, item: Tensor, artist: Tensor, album: Tensor) -> Tensor:
        return encoded(self.content, item) + encoded(self.extra, torch.cat([artist, album], -1))

    def actions(self, codes_BL: Tensor) -> Tensor:
        bits = ((codes_BL & (ACTIONS - 1)).unsqueeze(-1) >> torch.arange(3, device=codes_BL.device)) & 1
        return encoded(self.action, (bits.unsqueeze(-1) * self.action_bits).flatten(-2))

    def positions(self, length: int) -> Tensor:
        """Context tokens count from the start of their row, the others from its end, after the context."""
        context = self.config.context_tokens
        places = [*range(context), *(context + back for back in range(length, -1, -1))]
        return torch.tensor([min(place, self.config.positions - 1) for place in places])

    def ages(self, times_BL: Tensor, query_times_B: Tensor) -> Tensor:
        """The row of the time table for each token: the square root of the minutes before the query."""
        query_B1 = query_times_B.unsqueeze(1)
        context_BC = torch.zeros_like(query_B1).expand(-1, self.config.context_tokens)
        times_BT = torch.cat([context_BC, times_BL, query_B1], 1)
        seconds_BT = (query_B1 - times_BT).to(torch.float32).clamp(min=SHORTEST)
        return (seconds_BT / UNIT).double().sqrt().float().long().clamp(max=self.config.time_buckets)


def encoded(encoder: Encoder, x: Tensor) -> Tensor:
    hidden = encoder.first(x)
    out: Tensor = encoder.second(hidden * torch.sigmoid(encoder.first_norm(hidden)))
    return out if encoder.second_norm is None else encoder.second_norm(out)


def stu(
    layer: STULayer, x_BTD: Tensor, x_BKD: Tensor, there_BT: Tensor, divisor: int | Tensor
) -> tuple[Tensor, Tensor]:
    """A layer's outputs of history and candidates: events see those before them, a candidate all of them and itself."""
    alpha, there_B11T = layer.config.qk_dim**-0.5, there_BT[:, None, None]
    (u, v, q, k), (own_u, own_v, own_q, own_k) = (projected(layer, x) for x in (x_BTD, x_BKD))
    within = (F.silu((q * alpha) @ k.transpose(2, 3)) * there_B11T).tril() @ v
    across = F.silu((own_q * alpha) @ k.transpose(2, 3)) * there_B11T @ v
    across = across + F.silu((own_q * alpha * own_k).sum(3, keepdim=True)) * own_v
    return (
        gated(layer, x_BTD, u, (within / divisor).transpose(1, 2).flatten(2)),
        gated(layer, x_BKD, own_u, (across / divisor).transpose(1, 2).flatten(2)),
    )


def projected(layer: STULayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gates, and by head values, queries and keys, of tokens [..., tokens, width]."""
    config = layer.config
    normed = F.layer_norm(x, (config.dim,), layer.norm_weight, layer.norm_bias, EPS)
    wide, narrow = config.attention_width, config.key_width
    u, *heads = torch.split(normed @ layer.uvqk_weight + layer.uvqk_bias, [wide, wide, narrow, narrow], -1)
    v, q, k = (part.reshape(*part.shape[:-1], config.heads, -1).transpose(-2, -3) for part in heads)
    return u, v, q, k


def gated(layer: STULayer, x: Tensor, u: Tensor, attention: Tensor) -> Tensor:
    """The output of a layer from its input, its gates and its attention."""
    config = layer.config
    width = (config.attention_width,)
    norm = F.layer_norm(attention, width, layer.output_norm_weight, layer.output_norm_bias, EPS)
    gate = F.silu(u)
    return x + torch.cat([gate, attention, gate * norm], -1) @ layer.output_weight


@torch.no_grad()
def padded_inputs(model: DLRMv4, batch: HistoryBatch, length: int | None = None) -> dict[str, Tensor]:
    """The arguments of `PaddedDLRMv4` for a batch: embeddings looked up, histories padded to a length, by default to
    the model's longest."""
    config, length = model.config, model.config.max_history if length is None else length
    lengths_B, offsets_B1 = batch.history_offsets_B1.diff(), batch.history_offsets_B1
    place_L = torch.arange(length, device=lengths_B.device)
    at_BL = offsets_B1[1:].unsqueeze(1) - length + place_L
    there_BL = place_L >= length - lengths_B.unsqueeze(1)
    at_BL = torch.where(there_BL, at_BL, 0)

    def rows(feature: str) -> Tensor:
        name = FEATURE_TABLES[feature]
        return model.tables.table(name)[batch.features[feature][0].long() % config.table_rows[name]]

    def padded(values_T: Tensor) -> Tensor:
        hidden = values_T.new_zeros(1, *values_T.shape[1:]) if not len(values_T) else values_T
        picked = hidden[at_BL]
        return torch.where(there_BL.view(*there_BL.shape, *(1,) * (picked.dim() - 2)), picked, 0)

    inputs = {
        "context_BCW": torch.stack([rows(name) for name in config.context], 1),
        **{f"{name.removesuffix('_id')}_BLW": padded(rows(name)) for name in HISTORY},
        "candidate_BW3": torch.cat([rows(name) for name in CANDIDATE], 1),
        "actions_BL": padded(batch.actions_T.long()),
        "times_BL": padded(batch.times_T.long()),
        "lengths_B": lengths_B,
        "query_times_B": batch.query_times_B.long(),
    }
    return inputs if batch.rates_BF is None else {**inputs, "rates_BF": batch.rates_BF}


OF_CANDIDATE = ("item", "artist", "album")
"""Parts of a cross that belong to the candidate."""


def can_share(model: DLRMv4) -> bool:
    """Whether the candidates of a history may share it: crosses with the candidate have one row, which says nothing."""
    config: DLRMv4Config = model.config
    crosses = [name for name, (parts, _) in CROSSES.items() if set(parts) & set(OF_CANDIDATE)]
    plain = config.precision == "float32" and config.hstu.attention_scale == "fixed"
    # Tables in tiers or on several ranks are no tensors of all rows.
    plain &= type(model.tables) is DLRMv4Tables
    return plain and all(config.table_rows[name] == 1 for name in crosses)
