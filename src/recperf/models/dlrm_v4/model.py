"""DLRMv4: HSTU layers read a user's history, which is combined with one candidate; one logit per sample.

Shapes: B samples, T tokens of all rows, S positions (history and candidate) of all rows, C context tokens a row, W and
D width of a table row and of a token, N encoded entities: one each distinct (item, artist, album), or one a position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.streaming.features import HISTORY, RATES
from ...measure.spans import span
from ...ops.assemble import assemble
from ...ops.layer_norm import layer_norm, swish_layer_norm
from ..init import normal_, uniform_, xavier_normal_, xavier_uniform_
from ..mlp import ClickLoss
from .config import ACTIONS, CANDIDATE_CODE, DLRMv4Config
from .hstu import HSTU, DropoutMoment, TokenRows
from .inputs import Inputs
from .stages import Run, StagedLoss, Stages, spanned
from .tables import DLRMv4Tables

PERIODS = ((3600, 24), (86400, 7))
"""Length of a unit in seconds, and units per period: hours of a day, days of a week."""
TURN = 2 * 3.14
"""A full circle, as the published model rounds it."""
INPUT = "tokens"
"""The purpose of the tokens' dropout."""

Init = Callable[[Tensor, int, str], None]


class Encoder(nn.Module):
    """Linear layer, x * sigmoid(norm), linear layer and, if `normed`, a norm."""

    def __init__(self, before: int, hidden: int, after: int, *, normed: bool = True) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Linear(before, hidden), nn.LayerNorm(hidden)
        self.second = nn.Linear(hidden, after)
        self.second_norm = nn.LayerNorm(after) if normed else None

    def reset(self, seed: int, name: str, init: Init) -> None:
        for part, linear in (("first", self.first), ("second", self.second)):
            init(linear.weight, seed, f"{name}.{part}.weight")
            nn.init.zeros_(linear.bias)
        for norm in (self.first_norm, self.second_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Compute in the type of x."""
        norm = self.first_norm
        hidden = swish_layer_norm(linear(x, self.first), norm.weight, norm.bias, norm.eps)
        out = linear(hidden, self.second)
        if self.second_norm is None:
            return out
        return layer_norm(out, self.second_norm.weight, self.second_norm.bias, self.second_norm.eps)


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Apply a linear layer in the type of x; the weights are converted."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


class RatesTower(nn.Module):
    """Running rates to a logit: a linear part and an encoder."""

    def __init__(self, config: DLRMv4Config) -> None:
        super().__init__()
        self.encoder = Encoder(len(RATES), config.rates_hidden, 1, normed=False)
        self.linear = nn.Linear(len(RATES), 1)
        self.added: Tensor
        self.register_buffer("added", torch.zeros(2 + len(RATES)))

    def reset(self, seed: int) -> None:
        self.reset_added()
        self.encoder.reset(seed, "rates", xavier_uniform_)
        for weight in (self.linear.weight, self.linear.bias):
            nn.init.zeros_(weight)

    def reset_added(self) -> None:
        self.add(1.0, torch.zeros(len(RATES)), 0.0)

    @torch.no_grad()
    def add(self, scale: float, weights_F: Tensor, intercept: float) -> None:
        """Set the regression that is added to the logits of a trained model, times a scale."""
        self.added.copy_(torch.cat([torch.tensor([scale, intercept]), weights_F.cpu()]))

    def blended(self, logits_B1: Tensor, rates_BF: Tensor) -> Tensor:
        """Logits of the whole model with the regression; training knows nothing of it."""
        return logits_B1 * self.added[0] + self.added[1] + (rates_BF @ self.added[2:]).unsqueeze(-1)

    def forward(self, rates_BF: Tensor) -> Tensor:
        logits_B1: Tensor = self.linear(rates_BF) + self.encoder(rates_BF)
        return logits_B1


class DLRMv4(nn.Module):
    def __init__(
        self,
        config: DLRMv4Config,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        tables: DLRMv4Tables | None = None,
    ) -> None:
        """`tables` replaces the default ones, as for tables that several processes share."""
        super().__init__()
        self.config, self.moment = config, DropoutMoment(seed)
        dim, table = config.dim, config.table_dim
        self.tables = DLRMv4Tables(config, seed=seed, device=device) if tables is None else tables
        self.context_weight = nn.Parameter(torch.zeros(config.context_tokens, table, dim))
        self.context_bias = nn.Parameter(torch.zeros(config.context_tokens, dim))
        self.content = Encoder(table, config.encoder_hidden, dim)
        self.extra = Encoder(2 * table, config.encoder_hidden, dim)
        self.action_bits = nn.Parameter(torch.zeros(3, config.action_dim))
        self.candidate_action = nn.Parameter(torch.zeros(1, config.action_width))
        self.action = Encoder(config.action_width, config.encoder_hidden, dim)
        self.position_weight = nn.Parameter(torch.zeros(config.positions, dim))
        self.time_weight = nn.Parameter(torch.zeros(config.time_buckets + 1, dim))
        self.hstu = HSTU(config.hstu)
        self.combine = nn.Linear(dim + 2 * len(PERIODS), dim)
        self.combine_norm = nn.LayerNorm(dim)
        self.recent = Encoder(config.recent_features, config.head_hidden, dim) if config.recent else None
        self.item_tower = Encoder(3 * table, config.item_hidden, dim)
        self.head = Encoder(config.head_features, config.head_hidden, 1, normed=False)
        self.rates = RatesTower(config) if config.rates_hidden else None
        self.reset(seed, tables=False)
        self.to(device)

    def reset(self, seed: int, *, tables: bool = True) -> None:
        """Draw the initial weights: a pure function of the seed and of each parameter's name."""
        if tables:
            self.tables.reset(seed)
        config = self.config
        normal_(self.context_weight, math.sqrt(2 / (config.table_dim + config.dim)), seed, "context_weight")
        nn.init.zeros_(self.context_bias)
        for name, init in (
            ("content", xavier_normal_),
            ("extra", xavier_normal_),
            ("action", xavier_normal_),
            ("item_tower", xavier_uniform_),
            ("head", xavier_uniform_),
        ):
            cast(Encoder, self.get_submodule(name)).reset(seed, name, init)
        if self.rates is not None:
            self.rates.reset(seed)
        if self.recent is not None:
            self.recent.reset(seed, "recent", xavier_uniform_)
        for name in ("action_bits", "candidate_action"):
            normal_(self.get_parameter(name), 0.1, seed, name)
        for name in ("position_weight", "time_weight"):
            weight = self.get_parameter(name)
            uniform_(weight, weight.shape[0] ** -0.5, seed, name)
        if config.position_std:
            normal_(self.position_weight, config.position_std, seed, "position_weight")
        self.hstu.reset(seed, "hstu")
        xavier_normal_(self.combine.weight, seed, "combine.weight")
        nn.init.zeros_(self.combine.bias)
        self.combine_norm.reset_parameters()

    def set_step(self, seed: int, step: int, part: int = 0) -> None:
        """Set the dropout of the next passes, a function of these numbers."""
        self.moment = DropoutMoment(seed, step, part)

    def forward(self, inputs: Inputs) -> Tensor:
        """Compute the logits, one per sample."""
        return self.logits(inputs, spanned)

    def loss(self, inputs: Inputs) -> StagedLoss:
        """The scaled mean binary cross entropy. Its backward pass is split like the forward pass, so that each part has
        a span."""
        stages = Stages()
        logits_B = self.logits(inputs, stages.run)
        value = stages.run("loss", lambda logits_B: self.criterion(logits_B, inputs), logits_B)
        return StagedLoss(stages, value, logits_B.detach())

    def criterion(self, logits_B: Tensor, inputs: Inputs) -> Tensor:
        return self.config.loss_scale * ClickLoss().value(logits_B, inputs.labels_B.to(logits_B.dtype))

    def logits(self, inputs: Inputs, run: Run) -> Tensor:
        """Compute the whole model; `run` calls each part with the name of its span."""
        moment = self.moment
        with span("embedding"):
            rows = self.tables.lookup(inputs)
        *context, item_NW, artist_NW, album_NW, candidate_B3W = run(
            "embedding", lambda *leaves: self.picked(dict(zip(rows, leaves)), inputs), *rows.values()
        )
        entity_ND, action_ND = run(
            "encoders", lambda *parts: self.encoded(inputs, *parts), item_NW, artist_NW, album_NW
        )
        context_BCD = run("context", self.contextual, *context)
        tokens_TD = run("position_time", lambda *parts: self.tokens(inputs, *parts), context_BCD, entity_ND, action_ND)
        layout = TokenRows(inputs.offsets_B1, inputs.longest, inputs.whole_longest, inputs.numbers_T)
        # The layers set their own spans.
        last_BD = run("", lambda x_TD: self.hstu(x_TD, layout, moment), tokens_TD)
        user_BD = run("postprocessor", lambda x_BD: self.user(x_BD, inputs.query_times_B), last_BD)
        item_BD = run("item_tower", self.item_tower, candidate_B3W)
        logits_B: Tensor = run(
            "head",
            lambda user_BD, item_BD, *tokens: self.combined(inputs, user_BD, item_BD, *tokens),
            user_BD,
            item_BD,
            *(() if self.recent is None else (tokens_TD,)),
        )
        return logits_B

    def combined(self, inputs: Inputs, user_BD: Tensor, item_BD: Tensor, tokens_TD: Tensor | None = None) -> Tensor:
        """The logits of user and candidate and, where the model reads them, of the last events, given by all tokens,
        with that of the running rates added."""
        features, rates_BF = user_BD * item_BD, inputs.rates_BF
        if tokens_TD is not None:
            recent_BD = self.last_events(inputs, tokens_TD)[: len(features)]
            features = torch.cat([features, recent_BD.to(features.dtype)], 1)
        logits_B1: Tensor = self.head(features)
        if self.rates is not None:
            assert rates_BF is not None
            logits_B1 = logits_B1 + self.rates(rates_BF)
            logits_B1 = logits_B1 if self.training else self.rates.blended(logits_B1, rates_BF)
        return logits_B1.squeeze(1)

    def picked(self, rows: dict[str, Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
        """Embeddings of the context features, of items, artists and albums, and of the candidates."""
        context = [inputs.context[name].of(rows[name]) for name in self.config.context]
        entities = [inputs.entities[name].of(rows[name]) for name in HISTORY]
        candidate_B3W = torch.cat([inputs.candidates.of(part_NW) for part_NW in entities], 1)
        return *context, *entities, candidate_B3W

    def encoded(self, inputs: Inputs, item_NW: Tensor, artist_NW: Tensor, album_NW: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded entities and actions: one per kind with shared encoders, otherwise one per position."""
        content_ND = self.content(self._cast(item_NW))
        extra_ND = self.extra(self._cast(torch.cat([artist_NW, album_NW], 1)))
        codes_N = torch.arange(ACTIONS + 1, device=item_NW.device) if self.config.shared_encoders else inputs.codes_S
        action_ND = self.action(self._cast(self.action_features(codes_N)))
        return content_ND + extra_ND, action_ND

    def action_features(self, codes_N: Tensor) -> Tensor:
        """The concatenated embeddings of the bits that are set; the candidate has its own embedding."""
        bits_N3 = (codes_N.unsqueeze(1) >> torch.arange(3, device=codes_N.device)) & 1
        features_NA = (bits_N3.unsqueeze(2) * self.action_bits).flatten(1)
        return torch.where((codes_N == CANDIDATE_CODE).unsqueeze(1), self.candidate_action, features_NA)

    def contextual(self, *context: Tensor) -> Tensor:
        """One token per context feature, each by its own matrix."""
        x_CBW = self._cast(torch.stack(context))
        bias_C1D = self.context_bias.unsqueeze(1).to(x_CBW.dtype)
        return torch.baddbmm(bias_C1D, x_CBW, self.context_weight.to(x_CBW.dtype)).transpose(0, 1)

    def tokens(self, inputs: Inputs, context_BCD: Tensor, entity_ND: Tensor, action_ND: Tensor) -> Tensor:
        """The tokens of every row, context first, with positions and times added: the input of the first layer."""
        config = self.config
        rate = config.input_dropout if self.training else 0.0
        dropout = self.moment.dropout(rate, 0, INPUT, inputs.numbers_T)
        if not config.shared_encoders:
            # An entity per position already has its own action: the plan adds one that is zero.
            entity_ND, action_ND = entity_ND + action_ND, action_ND.new_zeros(1, config.dim)
        return assemble(
            context_BCD, entity_ND, action_ND, self.position_weight, self.time_weight, inputs.plan,
            scale=config.scale, dropout=dropout,
        )  # fmt: skip

    def last_events(self, inputs: Inputs, tokens_TD: Tensor) -> Tensor:
        """Each row's candidate and last events as one vector, from their tokens side by side, the newest first, with
        zeros where a row has fewer."""
        assert self.recent is not None
        back_K = torch.arange(1, self.config.recent + 2, device=tokens_TD.device)
        place_BK = inputs.offsets_B1[1:].unsqueeze(1) - back_K
        there_BK = place_BK >= (inputs.offsets_B1[:-1] + self.config.context_tokens).unsqueeze(1)
        picked_BKD = tokens_TD.index_select(0, place_BK.clamp_min(0).flatten()).view(*place_BK.shape, -1)
        recent_BD: Tensor = self.recent((picked_BKD * there_BK.unsqueeze(2)).flatten(1))
        return recent_BD

    def user(self, last_BD: Tensor, times_B: Tensor) -> Tensor:
        """The user's vector: the output of the layers with the time of day and of the week; the norm is in float32."""
        if last_BD.shape[0] != times_B.shape[0]:
            # The rows behind those of the samples only fill up shapes.
            last_BD = last_BD[: times_B.shape[0]]
        features = torch.cat([last_BD, time_features(times_B).to(last_BD.dtype)], 1)
        out_BD = linear(features, self.combine).to(self.combine_norm.weight.dtype)
        return layer_norm(out_BD, self.combine_norm.weight, self.combine_norm.bias, self.combine_norm.eps)

    def forget_gradients(self) -> None:
        """Drop the gradients of a step that was not finished."""
        self.zero_grad(set_to_none=True)
        self.tables.forget()

    def dense_parameters(self) -> list[nn.Parameter]:
        """All parameters outside the tables."""
        return list(self.parameters())

    def requires_grad_(self, requires_grad: bool = True) -> DLRMv4:
        """Freeze or train everything, the tables too, which are buffers."""
        super().requires_grad_(requires_grad)
        self.tables.requires_grad_(requires_grad)
        return self

    def _cast(self, x: Tensor) -> Tensor:
        return x.bfloat16() if self.config.precision == "bfloat16" else x


def time_features(times_B: Tensor) -> Tensor:
    """Cosine and sine of the hour of the day, then of the day of the week."""
    parts = []
    for unit, count in PERIODS:
        angle_B = TURN * ((times_B // unit).remainder(count) / count)
        parts += [angle_B.cos(), angle_B.sin()]
    return torch.stack(parts, 1)
