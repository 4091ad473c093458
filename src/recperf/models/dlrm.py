"""DLRM: a bottom MLP for dense features, tables for sparse ones, an interaction, a top MLP, one logit per sample.

`record` and `backward` of an interaction compute the same as `forward` and autograd, written out for the explicit
training step.

Shapes: B samples, F sparse features, V vectors a sample (the dense one first), D width of a table row, P pairs, W
output width, N = (F + 1) x D all vectors side by side, K rank of a cross layer.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.batch import ClickBatch, JaggedFeatures
from ..measure.spans import span
from ..ops.dot import reference
from ..ops.mlp.reference import End
from .config import DLRMConfig
from .embeddings import Embeddings, StackedTables
from .init import normal_
from .mlp import MLP, Arithmetic, ClickLoss, add_gradient


class Interaction(nn.Module, ABC):
    """The interface between a model and its interaction."""

    def reset(self, seed: int) -> None:
        """Draw the initial weights, if there are any."""

    @abstractmethod
    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Any]:
        """Return the output, B x W, and what `backward` needs."""

    @abstractmethod
    def backward(self, saved: Any, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the dense vector and of the sparse ones, F x B x D."""


class Concat(Interaction):
    """All vectors concatenated, the dense one first."""

    def forward(self, dense_BD: Tensor, sparse: list[Tensor]) -> Tensor:
        return torch.cat([dense_BD, *sparse], dim=1)

    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([dense_BD.to(sparse_FBD.dtype), *sparse_FBD.unbind(0)], dim=1), sparse_FBD

    def backward(self, saved: Tensor, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        features, batch, dim = saved.shape
        gradient_BW = gradient_BW.to(saved.dtype)
        dense = gradient_BW.shape[1] - features * dim
        return gradient_BW[:, :dense], gradient_BW[:, dense:].view(batch, features, dim).transpose(0, 1).contiguous()


class Dot(Interaction):
    """The dense vector, then the dot products of all pairs: the lower triangle, row by row.

    Pairs come as (1,0), (2,0), (2,1), (3,0) ...; with `diagonal` each row ends with the vector's product with itself.
    `body` is one of the implementations in `ops.dot`.
    """

    def __init__(self, vectors: int, *, diagonal: bool, body: ModuleType = reference) -> None:
        super().__init__()
        self.vectors, self.diagonal, self.body = vectors, diagonal, body
        self.width: int | None = None
        """Pad the output of the written-out step with zeros to this width."""

    def forward(self, dense_BD: Tensor, sparse: list[Tensor]) -> Tensor:
        """Use torch's own operators, for autograd."""
        output_BW, _ = reference.forward(dense_BD, torch.stack(sparse), diagonal=self.diagonal)
        return output_BW

    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Any]:
        body = self._body(sparse_FBD)
        output_BW, saved = body.forward(dense_BD, sparse_FBD, diagonal=self.diagonal, width=self.width)
        return output_BW, (saved, body)

    def backward(self, saved: Any, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        products, body = saved
        gradients: tuple[Tensor, Tensor] = body.backward(products, gradient_BW, diagonal=self.diagonal)
        return gradients

    def _body(self, sparse_FBD: Tensor) -> ModuleType:
        """C and Triton compute in float32, which is not enough for float64."""
        return reference if sparse_FBD.dtype == torch.float64 else self.body


Layer = tuple[nn.Parameter, nn.Parameter, nn.Parameter]
Saved = tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]
"""The sparse vectors, then for each layer its input, that after `down`, and that after `up` with the bias."""


class LowRankCross(Interaction):
    """The concatenated vectors, the dense one first, through the cross layers; the output is as wide as the input.

    The low-rank cross network of DCNv2: each layer multiplies its input by the first one once more.

        x_0 = the vectors side by side;  x_l+1 = x_0 * (up_l (down_l x_l) + bias_l) + x_l
    """

    def __init__(self, width: int, *, layers: int, rank: int) -> None:
        super().__init__()
        self.together = Concat()
        self.down_KN = nn.ParameterList(nn.Parameter(torch.empty(rank, width)) for _ in range(layers))
        self.up_NK = nn.ParameterList(nn.Parameter(torch.empty(width, rank)) for _ in range(layers))
        self.bias_N = nn.ParameterList(nn.Parameter(torch.empty(width)) for _ in range(layers))

    @property
    def layers(self) -> list[Layer]:
        return list(zip(self.down_KN, self.up_NK, self.bias_N))

    def reset(self, seed: int) -> None:
        """Draw weights from N(0, 2 / (in + out)); biases start at 0."""
        for index, (down_KN, up_NK, bias_N) in enumerate(self.layers):
            std = math.sqrt(2 / sum(down_KN.shape))
            normal_(down_KN, std, seed, f"cross.{index}.down")
            normal_(up_NK, std, seed, f"cross.{index}.up")
            nn.init.zeros_(bias_N)

    def forward(self, dense_BD: Tensor, sparse: list[Tensor]) -> Tensor:
        first_BN: Tensor = self.together(dense_BD, sparse)
        x_BN = first_BN
        for down_KN, up_NK, bias_N in self.layers:
            x_BN = first_BN * F.linear(F.linear(x_BN, down_KN), up_NK, bias_N) + x_BN
        return x_BN

    def record(self, dense_BD: Tensor, sparse_FBD: Tensor) -> tuple[Tensor, Saved]:
        # The cross layers have the type of the tables, also where the MLPs are computed in bfloat16.
        first_BN, _ = self.together.record(dense_BD, sparse_FBD)
        x_BN, passed = first_BN, []
        for down_KN, up_NK, bias_N in self.layers:
            low_BK = x_BN.mm(down_KN.t())
            factor_BN = torch.addmm(bias_N, low_BK, up_NK.t())
            passed.append((x_BN, low_BK, factor_BN))
            x_BN = torch.addcmul(x_BN, first_BN, factor_BN)
        return x_BN, (sparse_FBD, passed)

    def backward(self, saved: Saved, gradient_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the dense vector and of the sparse ones, F x B x D; add those of the layers."""
        sparse_FBD, passed = saved
        first_BN = passed[0][0]
        gradient_BN = gradient_BW.to(first_BN.dtype)
        first_gradient_BN = torch.zeros_like(first_BN)
        for (down_KN, up_NK, bias_N), (x_BN, low_BK, factor_BN) in zip(reversed(self.layers), reversed(passed)):
            first_gradient_BN.addcmul_(gradient_BN, factor_BN)
            factor_gradient_BN = gradient_BN * first_BN
            low_gradient_BK = factor_gradient_BN.mm(up_NK)
            add_gradient(bias_N, factor_gradient_BN.sum(0))
            add_gradient(up_NK, factor_gradient_BN.t().mm(low_BK))
            add_gradient(down_KN, low_gradient_BK.t().mm(x_BN))
            gradient_BN = torch.addmm(gradient_BN, low_gradient_BK, down_KN)
        return self.together.backward(sparse_FBD, first_gradient_BN.add_(gradient_BN))


class DLRM(nn.Module):
    """The model family: the config determines sizes and interaction; the default loss is binary cross entropy."""

    def __init__(
        self,
        config: DLRMConfig,
        *,
        seed: int = 0,
        embeddings: Embeddings | None = None,
        interaction: Interaction | None = None,
        loss: ClickLoss | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.bottom = MLP(config.bottom, last_relu=True)
        self.embeddings: Embeddings = embeddings or StackedTables(config.features, config.rows, config.dim)
        self.interaction: Interaction = interaction or make_interaction(config)
        self.top = MLP(config.top_widths, last_relu=False)
        self.criterion = loss or ClickLoss()
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
