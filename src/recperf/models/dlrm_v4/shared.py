"""Many candidates of one history: context and history are computed once, each candidate sees them and not the others.

That is possible where no context feature depends on the candidate: the history attends to its context.

Shapes: C candidates, T tokens of context and history, W and D width of a table row and of a token, H heads, A and V
width of a query and a value, F running rates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ...data.yambda.schema import CROSSES
from .config import DLRMv4Config
from .hstu import STULayer
from .model import DLRMv4, time_features
from .padded import PaddedDLRMv4, encoded, gated, projected
from .tables import DLRMv4Tables

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
