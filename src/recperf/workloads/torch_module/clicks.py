"""A torch module on labels of clicks: the rows of a config, a trial, and its loss.

Shapes: B samples, V ids in the batch, F columns.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.batch import ClickBatch
from ...data.order import ClickOrder
from ...data.rows.clicks import Clicks
from ...data.rows.imported import ImportedClicks, open_clicks
from ...measure.spans import span
from .. import division
from ..clicks import ClickTrialState, CopiedOrder, PreparedRows, StoredRows
from ..micro_dlrm.config import describe, ratings
from . import Columns, ModuleConfig, click_bounds
from .build import ModuleTrial, PreparedModule, require_shape


def clicks_of(config: ModuleConfig) -> ImportedClicks | Clicks:
    """Imported clicks, or ratings as clicks."""
    if not config.data.has_clicks:
        return ratings(config.data)
    assert config.data.path is not None
    return open_clicks(config.data.path, config.data.rows_split())


def columns_of(clicks: ImportedClicks | Clicks) -> Columns:
    return Columns(tuple(clicks.keys), tuple(clicks.table_rows), len(clicks.dense_names))


def check(config: ModuleConfig) -> str:
    return describe(clicks_of(config))


class ModuleClicks(PreparedModule, PreparedRows):
    """The clicks of a config, and a module for them."""

    source: StoredRows

    def __init__(self, config: ModuleConfig, model: str, optimizer: str) -> None:
        clicks = clicks_of(config)
        super().__init__(config, model, optimizer, columns_of(clicks))
        self.target, self.source = click_bounds(config), StoredRows(clicks, self.settings.device)
        self.data = self.source.data

    def new_trial(self, seed: int) -> ModuleTrial:
        return ClickModuleTrial(self, seed)


class ClickModuleTrial(ModuleTrial, ClickTrialState):
    """A module and the order of its batches."""

    def __init__(self, prepared: ModuleClicks, seed: int) -> None:
        self.prepared, self.seed, self.ranks = prepared, seed, division(prepared)
        settings, device = prepared.config.train, prepared.settings.device
        clicks = ClickOrder(store=prepared.source.clicks, batch_size=settings.batch_size, seed=seed, split="fit")
        self.begin(seed, CopiedOrder(clicks, device, pinned=device.type == "cuda"), loss_of)
        if prepared.source.choosing_rows:
            self.recipe = replace(self.recipe, validation_loss=self.validation_loss, patience=settings.patience)
        self.recipe = self.ranks.clicks(self.recipe, self.module)

    def logits_of(self, batch: ClickBatch) -> Tensor:
        return logits_of(self.module, batch)

    def rows_of(self, batch: ClickBatch) -> Tensor:
        """The rows of the columns that a batch looks up, those of one column after those of another."""
        features, rows = batch.features, (0, *self.prepared.columns.rows[:-1])
        firsts_F = torch.tensor(rows, device=features.values_V.device).cumsum(0)
        ids_F = torch.tensor(features.ids_per_key, device=features.values_V.device)
        return features.values_V + firsts_F.repeat_interleave(ids_F)


def logits_of(module: nn.Module, batch: ClickBatch) -> Tensor:
    """One logit for each row."""
    logits_B: Tensor = module(batch)
    if logits_B.shape == (len(batch), 1):
        logits_B = logits_B.squeeze(1)
    what = f"for a batch of {len(batch)} rows the module"
    return require_shape(logits_B, (len(batch),), what, fix="return one logit for each row")


def loss_of(module: nn.Module, batch: ClickBatch) -> Tensor:
    with span("forward"):
        logits_B = logits_of(module, batch)
    with span("loss"):
        return F.binary_cross_entropy_with_logits(logits_B, batch.labels_B)
