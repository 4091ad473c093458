"""DLRM: a bottom MLP for dense features, tables for sparse ones, an interaction, a top MLP, one logit per sample.

Shapes: B samples, D width of a table row, F sparse features.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..data.batch import ClickBatch, JaggedFeatures
from ..measure.spans import span
from ..ops.last_layer.reference import End
from .config import DLRMConfig
from .embeddings import Embeddings, StackedTables
from .interaction import Concat, Dot, Interaction, LowRankCross
from .mlp import MLP, Arithmetic, Loss


class DLRM(nn.Module):
    """The model family: the config determines sizes and interaction; the default loss is binary cross entropy."""

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
        self.criterion = loss or Loss()
        self.arithmetic = arithmetic or Arithmetic()
        if isinstance(self.interaction, Dot):
            self.interaction.width = self.arithmetic.width(config.interaction_width)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Draw the initial weights: a pure function of the seed and of each parameter's name."""
        self.bottom.reset(seed, "bottom")
        self.embeddings.reset(self.config.table_init_std, seed)
        self.interaction.reset(seed)
        self.top.reset(seed, "top")

    def forward(self, dense: Tensor, features: JaggedFeatures) -> Tensor:
        """Compute the logits, one per sample."""
        with span("bottom"):
            dense_BD = self.bottom(dense)
        with span("embedding"):
            pooled = self.embeddings(features)
        with span("interaction"):
            vectors_BW = self.interaction(dense_BD, [pooled[key] for key in self.config.features])
        with span("top"):
            logits_B: Tensor = self.top(vectors_BW).squeeze(1)
        return logits_B

    def loss(self, batch: ClickBatch) -> WrittenOutLoss:
        """The mean loss with its backward pass written out, part by part; it equals that of `forward` and autograd.

        A small model would spend much of its step in autograd's bookkeeping of 60 small nodes. And each part of the
        backward pass gets its own span.
        """
        return WrittenOutLoss(self, batch)

    def forget_gradients(self) -> None:
        """Drop the gradients of a step that was not finished."""
        self.zero_grad(set_to_none=True)
        self.embeddings.forget()
        self.arithmetic.streams.forget()

    def dense_parameters(self) -> list[nn.Parameter]:
        """All parameters outside the tables."""
        return [*self.bottom.parameters(), *self.interaction.parameters(), *self.top.parameters()]

    def requires_grad_(self, requires_grad: bool = True) -> DLRM:
        """Freeze or train everything, tables that are buffers too."""
        super().requires_grad_(requires_grad)
        self.embeddings.requires_grad_(requires_grad)
        return self


def make_interaction(config: DLRMConfig) -> Interaction:
    if config.interaction == "concat":
        return Concat()
    if config.interaction == "dot":
        return Dot(config.vectors, diagonal=config.diagonal)
    return LowRankCross(config.interaction_width, layers=config.cross_layers, rank=config.cross_rank)


class WrittenOutLoss:
    """A loss with its own backward pass; the training loop uses it like a tensor."""

    @torch.no_grad()
    def __init__(self, model: DLRM, batch: ClickBatch) -> None:
        self.model, self.batch, self.scale = model, batch, 1.0
        arithmetic = model.arithmetic
        with span("bottom"), arithmetic.streams.run_on("bottom"):
            dense_BD = arithmetic.begin((model.bottom, model.top), batch.dense_BD)
            assert dense_BD is not None
            self.bottom_acts = arithmetic.forward(model.bottom, dense_BD)
        with span("embedding"):
            pooled_FBD, self.looked_up = model.embeddings.record(batch.features)
        with span("interaction"):
            arithmetic.streams.join("bottom")
            vectors_BW, self.interaction_saved = model.interaction.record(self.bottom_acts[-1], pooled_FBD)
        with span("top"):
            self.top_acts = arithmetic.forward(model.top, vectors_BW, loss=model.criterion)
        with span("loss"):
            self.end = arithmetic.end(model.top, self.top_acts, model.criterion, batch.labels_B)
            if self.end is not None:
                self.logits_B = self.end.logits_B
                with arithmetic.streams.run_on("biases", self.end.loss_S):
                    self.value = self.end.loss_S.sum()
            else:
                self.logits_B = self.top_acts[-1].squeeze(1).to(pooled_FBD.dtype)
                with arithmetic.streams.run_on("biases", self.logits_B):
                    self.value = model.criterion.value(self.logits_B, batch.labels_B)

    def __mul__(self, scale: float) -> WrittenOutLoss:
        """Scale the loss and its gradients, as for a slice of a batch."""
        if scale == 1:
            return self
        scaled = copy.copy(self)
        scaled.value, scaled.scale = self.value * scale, self.scale * scale
        return scaled

    def detach(self) -> Tensor:
        return self.value

    @torch.no_grad()
    def backward(self) -> None:
        """Add the gradient of every dense parameter to its `grad`; the embeddings store theirs in their own way."""
        model, batch, arithmetic = self.model, self.batch, self.model.arithmetic
        with span("loss_backward"):
            if self.end is not None:
                slope: Tensor | End = self.end if self.scale == 1 else self.end.scaled(self.scale)
            else:
                slope = model.criterion.slope(self.logits_B, batch.labels_B).unsqueeze(1)
                slope = slope if self.scale == 1 else slope * self.scale
        with span("top_backward"):
            vectors_gradient = arithmetic.backward(model.top, slope, self.top_acts, input_gradient=True)
            assert vectors_gradient is not None
        with span("interaction_backward"):
            dense_gradient, pooled_gradient = model.interaction.backward(self.interaction_saved, vectors_gradient)
        with span("embedding_backward"):
            if not model.embeddings.frozen:
                model.embeddings.backward(self.looked_up, batch.features, pooled_gradient)
        with span("bottom_backward"):
            arithmetic.backward(model.bottom, dense_gradient, self.bottom_acts, input_gradient=False)
