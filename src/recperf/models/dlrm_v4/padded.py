"""The dense part of a trained DLRMv4 in plain torch: on histories padded to one length, which `torch.export` can trace,
and on one history with many candidates.

A row has its context tokens, its history at the end of `length` places, and its candidate. Places before a history are
hidden from attention. Computes in float32, whatever the precision of training.

Shapes: B samples, L places for a history, C context tokens or candidates of one history, T tokens, W and D width of a
table row and of a token, H heads, A and V width of a query and a value, F running rates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.batch import HistoryBatch
from ...data.yambda.schema import CANDIDATE, CROSSES, HISTORY
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
        """One logit per sample."""
        config, width = self.config, self.config.table_dim
        context_CBD = torch.baddbmm(self.context_bias.unsqueeze(1), context_BCW.transpose(0, 1), self.context_weight)
        history_BLD = self.entity(item_BLW, artist_BLW, album_BLW) + self.actions(actions_BL)
        item_BW, artist_BW, album_BW = torch.split(candidate_BW3, width, 1)
        candidate_BD = self.entity(item_BW, artist_BW, album_BW) + encoded(self.action, self.candidate_action)
        x_BTD = torch.cat([context_CBD.transpose(0, 1), history_BLD, candidate_BD.unsqueeze(1)], 1) * config.scale
        length, context = times_BL.shape[1], config.context_tokens
        x_BTD = (
            x_BTD + self.position_weight[self.positions(length)] + self.time_weight[self.ages(times_BL, query_times_B)]
        )
        tokens_BTD = x_BTD
        tokens_B1 = (lengths_B + context + 1).unsqueeze(1)
        place_T = torch.arange(context + length + 1, device=times_BL.device)
        there_BT = (place_T < context) | (place_T >= length + context - lengths_B.unsqueeze(1))
        seen_BTT = there_BT.unsqueeze(1) & (place_T.unsqueeze(1) >= place_T)
        divisor = config.hstu.max_length if config.hstu.attention_scale == "fixed" else tokens_B1.max()
        for layer in self.hstu.layers:
            assert isinstance(layer, STULayer)
            x_BTD = stu(layer, x_BTD, seen_BTT, divisor)
        features = torch.cat([x_BTD[:, -1], time_features(query_times_B)], 1)
        user_BD = self.combine_norm(self.combine(features))
        product_BD = user_BD * encoded(self.item_tower, candidate_BW3)
        logits_B1 = encoded(self.head, torch.cat([product_BD, *self.last_events(tokens_BTD, there_BT)], 1))
        if rates_BF is not None:
            logits_B1 = logits_B1 + self.rates.linear(rates_BF) + encoded(self.rates.encoder, rates_BF)
            logits_B1 = self.rates.blended(logits_B1, rates_BF)
        return logits_B1.squeeze(1)

    def last_events(self, tokens_BTD: Tensor, there_BT: Tensor) -> tuple[Tensor, ...]:
        """The candidate and the last events as one vector, where the model reads them directly."""
        if not self.config.recent:
            return ()
        places = [-1 - back for back in range(self.config.recent + 1)]
        return (encoded(self.recent, (tokens_BTD * there_BT.unsqueeze(2))[:, places].flatten(1)),)

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


def stu(layer: STULayer, x_BTD: Tensor, seen_BTT: Tensor, divisor: int | Tensor) -> Tensor:
    u_BTE, v_BHTV, q_BHTA, k_BHTA = projected(layer, x_BTD)
    scores = F.silu((q_BHTA * layer.config.qk_dim**-0.5) @ k_BHTA.transpose(2, 3)) * seen_BTT.unsqueeze(1)
    return gated(layer, x_BTD, u_BTE, ((scores @ v_BHTV) / divisor).transpose(1, 2).flatten(2))


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
def padded_inputs(model: DLRMv4, batch: HistoryBatch) -> dict[str, Tensor]:
    """The arguments of `PaddedDLRMv4` for a batch: embeddings looked up, histories padded to the model's longest."""
    config, length = model.config, model.config.max_history
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


class SharedHistory(PaddedDLRMv4):
    """Has the parameters of a model, and scores candidates in plain torch."""

    @torch.no_grad()
    def logits(self, row: Mapping[str, Tensor], candidate_CW3: Tensor, rates_CF: Tensor | None) -> Tensor:
        """Logits of candidates, given by their embeddings; `row` has the arguments of `forward` for one sample, of
        which the candidate is ignored."""
        config = self.config
        history_TD = self.history(row)
        item_CW, artist_CW, album_CW = torch.split(candidate_CW3, config.table_dim, 1)
        # The age of a candidate is 0, as that of its query.
        query_1 = row["query_times_B"]
        place_D = (
            self.position_weight[config.context_tokens] + self.time_weight[self.ages(query_1[:, None], query_1)[0, -1]]
        )
        candidate = self.entity(item_CW, artist_CW, album_CW) + encoded(self.action, self.candidate_action)
        tokens_CD = candidate * config.scale + place_D
        x_TD, x_CD = history_TD, tokens_CD
        for layer in self.hstu.layers:
            assert isinstance(layer, STULayer)
            x_TD, x_CD = self._layer(layer, x_TD, x_CD)
        times = time_features(query_1).expand(len(x_CD), -1)
        user_CD = self.combine_norm(self.combine(torch.cat([x_CD, times], 1)))
        features = [user_CD * encoded(self.item_tower, candidate_CW3)]
        if config.recent:
            events_TD = history_TD[config.context_tokens :].flip(0)[: config.recent]
            events_KD = F.pad(events_TD, (0, 0, 0, config.recent - len(events_TD)))
            recent = torch.cat([tokens_CD, events_KD.flatten().expand(len(tokens_CD), -1)], 1)
            features.append(encoded(self.recent, recent))
        logits_C1 = encoded(self.head, torch.cat(features, 1))
        if rates_CF is not None:
            logits_C1 = logits_C1 + self.rates.linear(rates_CF) + encoded(self.rates.encoder, rates_CF)
            logits_C1 = self.rates.blended(logits_C1, rates_CF)
        return logits_C1.squeeze(1)

    def history(self, row: Mapping[str, Tensor]) -> Tensor:
        """The tokens of context and history."""
        config, length = self.config, int(row["lengths_B"])
        places = row["times_BL"].shape[1]
        item, artist, album, actions = (
            row[name][:, places - length :] for name in ("item_BLW", "artist_BLW", "album_BLW", "actions_BL")
        )
        context = torch.baddbmm(self.context_bias.unsqueeze(1), row["context_BCW"].transpose(0, 1), self.context_weight)
        history = self.entity(item, artist, album) + self.actions(actions)
        ages_T = self.ages(row["times_BL"][:, places - length :], row["query_times_B"])[0, :-1]
        tokens_TD = torch.cat([context.squeeze(1), history.squeeze(0)]) * config.scale
        return tokens_TD + self.position_weight[self.positions(length)[:-1]] + self.time_weight[ages_T]

    def _layer(self, layer: STULayer, x_TD: Tensor, x_CD: Tensor) -> tuple[Tensor, Tensor]:
        config = layer.config
        (u_TE, v_HTV, q_HTA, k_HTA), (u_CE, v_HCV, q_HCA, k_HCA) = (projected(layer, x) for x in (x_TD, x_CD))
        alpha, length = config.qk_dim**-0.5, config.max_length
        within_HTT = F.silu(alpha * q_HTA @ k_HTA.transpose(1, 2)).tril()
        across_HCT = F.silu(alpha * q_HCA @ k_HTA.transpose(1, 2))
        own_HC1 = F.silu(alpha * (q_HCA * k_HCA).sum(2, keepdim=True))
        of_history, of_candidates = within_HTT @ v_HTV / length, (across_HCT @ v_HTV + own_HC1 * v_HCV) / length
        return (
            gated(layer, x_TD, u_TE, of_history.transpose(0, 1).flatten(1)),
            gated(layer, x_CD, u_CE, of_candidates.transpose(0, 1).flatten(1)),
        )
