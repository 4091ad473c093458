"""dlrm on several ranks: TorchRec divides the tables, or with AdamW each rank holds a copy of them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...distributed.bags import BagTables
from ...distributed.ranks import current
from ...errors import ConfigError
from ...models.embeddings import Embeddings
from ...models.streams import SideStreams
from ...plan.memory import rank_demand
from ...train.loop import Optimizer
from ...train.optim import make_dense
from ..click_ranks import DenseAndBags, RankTrialState, SharedClicks, require_copies
from .build import DLRMTrial, PreparedDLRM
from .config import planned


class PreparedDLRMOnRanks(PreparedDLRM):
    def trial(self, seed: int) -> DLRMTrial:
        return RankDLRMTrial(self, seed)


class RankDLRMTrial(RankTrialState, DLRMTrial):
    """One rank of a trial of dlrm."""

    def __init__(self, prepared: PreparedDLRMOnRanks, seed: int) -> None:
        self.world = current()
        config, train = prepared.config, prepared.config.train
        self.demand = rank_demand(
            planned(config), self.world.size, config.distributed, on_cpu=self.world.device == "cpu"
        )
        if train.optimizer == "adamw":
            require_copies(config.distributed, self.demand, self.world)
        if train.micro_batches > 1:
            raise ConfigError(
                f"train.micro_batches is {train.micro_batches}: a rank takes its part of a batch in one piece, since "
                "fbgemm updates tables in each backward pass",
                where={"field": "train.micro_batches"},
                fix="--train.micro-batches 1; more ranks have smaller parts",
            )
        super().__init__(prepared, seed)
        self.share_out(prepared.settings, prepared.config.distributed)

    def _embeddings(self, device: torch.device, streams: SideStreams) -> Embeddings:
        prepared, config = self.prepared, self.prepared.config
        reasons, train = prepared.settings.reasons, config.train
        if train.optimizer == "adamw":
            return super()._embeddings(device, streams)
        tables = BagTables(
            self.demand, config.distributed, self.world, optimizer=train.optimizer, eps=train.eps, device=device
        )
        kinds = ["fbgemm"] * bool(tables.sharded) + ["torch for data-parallel tables"] * bool(tables.copies.names)
        reasons["embedding"] = reasons["bag"] = f"{', '.join(kinds)}: several ranks"
        return tables

    def _optimizer(self, streams: SideStreams) -> Optimizer:
        if self.rank_tables is None:
            return super()._optimizer(streams)
        train, plain = self.prepared.config.train, not self.prepared.switches.optimizer
        groups = [(self.model.dense_parameters(), 0.0)]
        return DenseAndBags(make_dense(train.optimizer, groups, eps=train.eps, plain=plain), self.rank_tables)

    def predicted(self) -> tuple[Tensor, Tensor]:
        source, device = self.prepared.source, self.prepared.settings.device
        rows = self.prepared.data["valid_rows"]
        return self.scored(source.held_out(self.seed, device, self.part), source.held_out_samples, rows)

    def rows_of(self, batch: Any) -> Tensor:
        """The table rows that this rank's part of a batch looks up."""
        part = cast(SharedClicks, batch).part
        return self.rank_tables.rows_of(part.features) if self.rank_tables else super().rows_of(part)
