"""DLRM: a bottom MLP for dense features, tables for sparse ones, an interaction, a top MLP, one logit a sample.

Shapes: B samples, D width of a table row, F sparse features.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..data.batch import ClickBatch, JaggedFeatures
from ..measure.spans import span
from .arithmetic import Arithmetic
from .config import DLRMConfig
from .cross import LowRankCross
from .embeddings import Embeddings, StackedTables
from .interaction import Concat, Dot, Interaction
from .losses import BCE, Loss
from .mlp import MLP


class DLRM(nn.Module):
    """The whole family; the config decides sizes and interaction, the loss is binary cross entropy if none is given."""

    def __init__(
        self,
        config: DLRMConfig,
        *,
        seed: int = 0,
        embeddings: Embeddings | None = None,
        interaction: Interaction | None = None,
        loss: Loss | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.bottom = MLP(config.bottom, last_relu=True)
        self.embeddings: Embeddings = embeddings or StackedTables(config.features, config.rows, config.dim)
        self.interaction: Interaction = interaction or make_interaction(config)
        self.top = MLP(config.top_widths, last_relu=False)
        self.criterion: Loss = loss or BCE()
        self.arithmetic = arithmetic or Arithmetic()
        if isinstance(self.interaction, Dot):
            self.interaction.width = self.arithmetic.width(config.interaction_width)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Initial weights, a pure function of the seed and of each parameter's name."""
        self.bottom.reset(seed, "bottom")
        self.embeddings.reset(self.config.table_init_std, seed)
        self.interaction.reset(seed)
        self.top.reset(seed, "top")

    def forward(self, dense: Tensor, features: JaggedFeatures) -> Tensor:
        """Logits, one a sample."""
        with span("bottom"):
            dense_BD = self.bottom(dense)
        with span("embedding"):
            pooled = self.embeddings(features)
        with span("interaction"):
            met = self.interaction(dense_BD, [pooled[key] for key in self.config.features])
        with span("top"):
            logits_B: Tensor = self.top(met).squeeze(1)
        return logits_B

    def plain_loss(self, batch: ClickBatch) -> Tensor:
        """The mean loss by torch's own operators and autograd: short, and what `loss` must equal."""
        return self.criterion.value(self(batch.dense_BD, batch.features), batch.labels_B)

    def loss(self, batch: ClickBatch) -> WrittenOutLoss:
        """The same loss with its backward pass written out, part by part.

        A model this small spends much of its step on autograd's bookkeeping of 60 small nodes. Written out it does not,
        and each part of the backward pass gets a span of its own.
        """
        return WrittenOutLoss(self, batch)

    def dense_parameters(self) -> list[nn.Parameter]:
        """All that are not in tables."""
        return [*self.bottom.parameters(), *self.interaction.parameters(), *self.top.parameters()]


def make_interaction(config: DLRMConfig) -> Interaction:
    if config.interaction == "concat":
        return Concat()
    if config.interaction == "dot":
        return Dot(config.vectors, diagonal=config.diagonal)
    return LowRankCross(config.interaction_width, layers=config.cross_layers, rank=config.cross_rank)


class WrittenOutLoss:
    """A loss that knows its own backward pass; to the training loop it is like a tensor."""

    @torch.no_grad()
    def __init__(self, model: DLRM, batch: ClickBatch) -> None:
        self.model, self.batch, self.scale = model, batch, 1.0
        how = model.arithmetic
        with span("bottom"):
            how.begin((model.bottom, model.top))
            self.bottom_acts = how.forward(model.bottom, batch.dense_BD)
        with span("embedding"):
            pooled_FBD, self.looked_up = model.embeddings.record(batch.features)
        with span("interaction"):
            met, self.met_saved = model.interaction.record(self.bottom_acts[-1], pooled_FBD)
        with span("top"):
            self.top_acts = how.forward(model.top, met)
        with span("loss"):
            self.logits_B = self.top_acts[-1].squeeze(1).float()
            with how.lanes.aside("weights", self.logits_B):
                self.value = model.criterion.value(self.logits_B, batch.labels_B)

    def __mul__(self, scale: float) -> WrittenOutLoss:
        """The loss times a number, as of a slice of a batch; its gradients are scaled with it."""
        if scale == 1:
            return self
        scaled = copy.copy(self)
        scaled.value, scaled.scale = self.value * scale, self.scale * scale
        return scaled

    def detach(self) -> Tensor:
        return self.value

    @torch.no_grad()
    def backward(self) -> None:
        """Add the gradient of every dense parameter to its `grad`; the embeddings keep theirs as they see fit."""
        model, batch, how = self.model, self.batch, self.model.arithmetic
        with span("loss_backward"):
            slope_B = model.criterion.slope(self.logits_B, batch.labels_B)
            if self.scale != 1:
                slope_B = slope_B * self.scale
        with span("top_backward"):
            met_gradient = how.backward(model.top, slope_B.unsqueeze(1), self.top_acts, input_gradient=True)
            assert met_gradient is not None
        with span("interaction_backward"):
            dense_gradient, pooled_gradient = model.interaction.backward(self.met_saved, met_gradient)
        with span("embedding_backward"):
            model.embeddings.backward(self.looked_up, batch.features, pooled_gradient)
        with span("bottom_backward"):
            how.backward(model.bottom, dense_gradient, self.bottom_acts, input_gradient=False)
