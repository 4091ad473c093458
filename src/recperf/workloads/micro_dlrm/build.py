"""A trial of micro-dlrm: MovieLens as tensors, the model, its optimizer and the order of its batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...data.batch import ClickBatch
from ...data.order import ShuffledOrder
from ...distributed.ranks import current
from ...measure.cost import FLOAT, Cost
from ...models.dlrm import DLRM
from ...models.tables import SparseTables
from ...train.device import BETWEEN_RANKS, FIXED_SHAPES, SWITCH, choose, choose_graph
from ...train.feeds import IndexedBatch, IndexedFeed, IndexedOrder
from ...train.graph import GraphStep
from ...train.loop import Optimizer
from ...train.optim import AdamW, SparseRows, SplitOptimizer
from .. import division
from ..clicks import DLRMTrialState, PreparedRows, StoredRows, largest_product, one_cycle_recipe
from .config import MicroDLRMConfig, bounds, planned, require_room, rows_of, step_cost


def sparse_tables(config: MicroDLRMConfig, device: torch.device) -> SparseTables | None:
    """The tables with an optimizer of the rows that a step used; None with AdamW, which has a dense gradient."""
    model = config.model
    return None if config.rule is None else SparseTables(model.features, model.rows, model.dim, device=device)


class PreparedClicks(PreparedRows):
    """MovieLens or imported clicks, the rows to train on as tensors."""

    source: StoredRows

    def __init__(self, config: MicroDLRMConfig) -> None:
        require_room(config)
        self.config = config
        product = largest_product(config.model, config.train.batch_size)
        self.settings = choose(config.train, largest_product_flops=product)
        self.source = StoredRows(rows_of(config), self.settings.device)
        self.train = self.source.samples("fit")
        self.data = self.source.data
        self.target = bounds(config, self.data)
        lack = current().choose("", several=BETWEEN_RANKS)
        self.graph, self.settings.reasons["graph"] = choose_graph(
            config.train.graph, self.settings.device, lack, why=FIXED_SHAPES, switch=SWITCH
        )

    def trial(self, seed: int) -> ClickTrial:
        return ClickTrial(self, seed)

    def step_cost(self, batch: Any, ids: int, unique: int) -> dict[str, Cost]:
        return step_cost(self.config, len(batch), unique=unique)

    def table_bytes(self) -> tuple[int, int]:
        row = FLOAT * self.config.model.dim
        return row, row * sum(self.config.model.rows)


class ClickTrial(DLRMTrialState):
    """One DLRM, its optimizer and the order of its batches."""

    prepared: PreparedClicks

    def __init__(self, prepared: PreparedClicks, seed: int) -> None:
        self.prepared, self.seed, self.ranks = prepared, seed, division(prepared, planned)
        config, settings, device = prepared.config, prepared.config.train, prepared.settings.device
        bags = self.ranks.bags(settings.table_optimizer, decay=settings.table_weight_decay)
        self.model = DLRM(config.model, seed=seed, embeddings=bags or sparse_tables(config, device)).to(device)
        self.optimizer = self._optimizer()
        order = ShuffledOrder(samples=prepared.train.to(device), batch_size=settings.batch_size, seed=seed)
        self.recipe = one_cycle_recipe(self.model, self.optimizer, order, settings)
        if prepared.graph:
            step = GraphStep(
                self.model,
                self.optimizer,
                IndexedFeed(order),
                device=device,
                reasons=prepared.settings.reasons,
                requested_by=SWITCH if settings.graph == "on" else None,
            )
            self.recipe = replace(self.recipe, order=IndexedOrder(order), whole_step=step)
        if prepared.source.choosing_rows:
            self.recipe = replace(self.recipe, validation_loss=self.validation_loss, patience=settings.patience)
        self.recipe = self.ranks.clicks(self.recipe, self.model, table_rate=settings.table_ratio)

    def _optimizer(self) -> Optimizer:
        settings, rule, tables = self.prepared.config.train, self.prepared.config.rule, self.model.embeddings
        groups = [(self.model.dense_parameters(), settings.weight_decay)]
        if rule is None:
            return AdamW([*groups, (list(tables.parameters()), settings.table_weight_decay)])
        dense = AdamW(groups)
        if not isinstance(tables, SparseTables):
            return self.ranks.with_bags(dense, table_rate=settings.table_ratio)
        self.prepared.settings.reasons["bag"] = tables.why
        rows = SparseRows(tables, rule.name, decay=settings.table_weight_decay)
        return SplitOptimizer(dense, rows, table_ratio=settings.table_ratio)

    def rows_of(self, batch: ClickBatch | IndexedBatch) -> Tensor:
        """The table rows a batch looks up."""
        batch = batch.gathered() if isinstance(batch, IndexedBatch) else batch
        tables: Any = self.model.embeddings
        rows_V: Tensor = tables.rows_of(batch.features)
        return rows_V
