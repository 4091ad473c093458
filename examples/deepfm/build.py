"""A trial of DeepFM: the model, its optimizer and its batches. Shapes: B samples, F features, D width, N rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recperf.data.batch import ClickBatch
from recperf.data.order import ShuffledOrder
from recperf.measure.cost import FLOAT, Cost
from recperf.measure.spans import span
from recperf.models.embeddings import StackedTables
from recperf.train.device import choose
from recperf.train.optim import AdamW
from recperf.workloads.clicks import DLRMTrialState, PreparedRows, StoredRows, one_cycle_recipe
from recperf.workloads.micro_dlrm.config import ratings

from .config import DeepFMConfig, estimate, sizes


class DeepFM(nn.Module):
    def __init__(self, config: DeepFMConfig, keys: tuple[str, ...], seed: int) -> None:
        super().__init__()
        rows, widths = sizes(config)
        torch.manual_seed(seed)
        self.embeddings = StackedTables(keys, rows, config.dim + 1)  # The last column holds the linear weights.
        self.embeddings.reset(0.01, seed)
        linear = [nn.Linear(before, after) for before, after in zip(widths, widths[1:])]
        self.mlp = nn.Sequential(*[part for layer in linear for part in (layer, nn.ReLU())][:-1])

    def forward(self, batch: ClickBatch) -> Tensor:
        with span("embedding"):
            rows_FBD = torch.stack(list(self.embeddings(batch.features).values()))
            vectors_FBD, linear_FB = rows_FBD[..., :-1], rows_FBD[..., -1]
        with span("interaction"):
            pairs_B = (vectors_FBD.sum(0).square() - vectors_FBD.square().sum(0)).sum(-1) / 2
        with span("top"):
            deep_B1 = self.mlp(torch.cat([*vectors_FBD, batch.dense_BD], dim=1))
        return linear_FB.sum(0) + pairs_B + deep_B1.squeeze(1)

    def loss(self, batch: ClickBatch) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(batch), batch.labels_B)


class PreparedDeepFM(PreparedRows):
    def __init__(self, config: DeepFMConfig) -> None:
        self.config, self.target = config, config.target.bounds("user_item_bias")
        self.settings = choose(config.train, largest_product_flops=0)
        self.source = StoredRows(ratings(config.data), self.settings.device)
        self.data = self.source.data

    def trial(self, seed: int) -> DeepFMTrial:
        return DeepFMTrial(self, seed)

    def step_cost(self, batch: ClickBatch, ids: int, unique: int) -> dict[str, Cost]:
        return estimate(self.config, unique, len(batch)).step

    def table_bytes(self) -> tuple[int, int]:
        return FLOAT * (self.config.dim + 1), estimate(self.config).table_bytes


class DeepFMTrial(DLRMTrialState):
    def __init__(self, prepared: PreparedDeepFM, seed: int) -> None:
        self.prepared, self.seed = prepared, seed
        train, device = prepared.config.train, prepared.settings.device
        rows = prepared.source.samples("train").to(device)
        self.model = DeepFM(prepared.config, rows.keys, seed).to(device)
        self.optimizer = AdamW([(list(self.model.parameters()), train.weight_decay)])
        order = ShuffledOrder(samples=rows, batch_size=train.batch_size, seed=seed)
        self.recipe = one_cycle_recipe(self.model, self.optimizer, order, train)

    def logits_of(self, batch: ClickBatch) -> Tensor:
        return self.model(batch)

    def rows_of(self, batch: ClickBatch) -> Tensor:
        return self.model.embeddings.rows_of(batch.features)
