"""DLRM: a bottom MLP for dense features, tables for sparse ones, an interaction, a top MLP, one logit a sample.

Shapes: B samples, D width of a table row.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..data.batch import ClickBatch, JaggedFeatures
from ..measure.spans import span
from .config import DLRMConfig
from .embeddings import StackedTables
from .interaction import Concat, Dot
from .mlp import MLP


class DLRM(nn.Module):
    """The whole family; the config decides sizes and interaction."""

    def __init__(self, config: DLRMConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.bottom = MLP(config.bottom, last_relu=True)
        self.embeddings = StackedTables(config.features, config.rows, config.dim)
        self.interaction: nn.Module = (
            Concat() if config.interaction == "concat" else Dot(config.vectors, diagonal=config.diagonal)
        )
        self.top = MLP(config.top_widths, last_relu=False)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Initial weights, a pure function of the seed and of each parameter's name."""
        self.bottom.reset(seed, "bottom")
        self.embeddings.reset(self.config.table_init_std, seed)
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

    def loss(self, batch: ClickBatch) -> Tensor:
        """Mean binary cross entropy, from logits so that a confident mistake still has a gradient."""
        logits_B = self(batch.dense_BD, batch.features)
        with span("loss"):
            return F.binary_cross_entropy_with_logits(logits_B, batch.labels_B)

    def table_parameters(self) -> list[nn.Parameter]:
        return [self.embeddings.weight_RD]

    def dense_parameters(self) -> list[nn.Parameter]:
        return [*self.bottom.parameters(), *self.top.parameters()]
