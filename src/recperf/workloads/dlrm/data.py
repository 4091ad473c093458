"""The batches of dlrm: drawn at random, or read from imported clicks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import to_json
from ...data.batch import ClickBatch
from ...data.click_store.columns import Split
from ...data.click_store.imported import ImportedClicks, open_clicks
from ...data.click_store.order import ClickOrder
from ...data.order import WHOLE, RankPart
from ...data.random_bags import RandomBags
from ...execution.workload import ScoredRows, describe_synthetic
from ...train.baselines import synthetic_logits
from ...train.ranking import Scorer
from ..click_candidates import ClickCatalogue, of_imported
from ..clicks import (
    SCORING_BATCH,
    imported_facts,
    imported_logits,
    imported_rows,
    imported_strongest,
    require_tables,
)
from .config import DLRMWorkloadConfig, require_room


def check(config: DLRMWorkloadConfig) -> str:
    """Check the data without reading all of it, and the memory where a CPU will train; the line names the data."""
    if config.train.device == "cpu" or not Path("/dev/nvidia0").exists():
        require_room(config)
    _require_readable(config)
    if config.data.source == "random":
        return f"synthetic batches, {config.data.ids} ids"
    facts = imported(config).describe()
    return f"{facts['name']}, {facts['rows']:,} rows, split {facts['split']}"


def _require_readable(config: DLRMWorkloadConfig) -> None:
    """Refuse tables that do not fit the imported clicks."""
    if config.data.source == "clicks":
        require_tables(config.dlrm, imported(config))


def imported(config: DLRMWorkloadConfig) -> ImportedClicks:
    assert config.data.path is not None
    return open_clicks(config.data.path, config.data.click_split())


@dataclass(frozen=True)
class CopiedOrder:
    """Batches made on the host and copied to the device one step at a time."""

    order: RandomBags | ClickOrder
    device: torch.device
    pinned: bool

    def __len__(self) -> int:
        return len(self.order)

    def share(self, part: RankPart) -> CopiedOrder:
        return replace(self, order=self.order.share(part))

    def whole_samples(self, number: int) -> int:
        return self.order.whole_samples(number)

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        for batch in self.order.batches(epoch, start):
            yield (batch.pin_memory() if self.pinned else batch).to(self.device, non_blocking=self.pinned)


class ClickSource:
    """Random batches or imported clicks, opened for a device."""

    def __init__(self, config: DLRMWorkloadConfig, device: torch.device | str = "cpu") -> None:
        _require_readable(config)
        self.config, self.model, self.device = config, config.dlrm, torch.device(device)
        self._store = None if config.data.source == "random" else imported(config)
        self.scoring_batch = config.train.batch_size if self._store is None else SCORING_BATCH
        self.data = self._drawn_facts() if self._store is None else imported_facts(self._store)
        """What a result records about the data."""

    def _drawn_facts(self) -> dict[str, Any]:
        data, batch = self.config.data, self.config.train.batch_size
        parts = {"data": to_json(data), "seed": self.config.seed, "batch": batch, "rows": self.model.rows}
        return describe_synthetic(f"synthetic {data.ids} ids", data, batch, parts)

    def verified(self) -> dict[str, int] | None:
        return None if self._store is None else self._store.verified()

    def bags(self, seed: int, device: torch.device | str | None = None) -> RandomBags:
        return RandomBags(
            keys=self.model.features,
            rows=self.model.rows,
            dense=self.model.dense,
            batch_size=self.config.train.batch_size,
            seed=seed,
            device=str(device or self.device),
            config=self.config.data,
        )

    def host_order(self, seed: int) -> RandomBags | ClickOrder:
        if self._store is None:
            return self.bags(seed, "cpu")
        return ClickOrder(store=self._store, batch_size=self.config.train.batch_size, seed=seed, split="fit")

    @property
    def choosing_rows(self) -> int:
        """Training rows that choose the epoch."""
        return 0 if self._store is None else self._store.count("choose")

    def held_out(self, seed: int, part: RankPart = WHOLE, split: Split = "valid") -> Iterable[ClickBatch]:
        if self._store is None:
            return self.bags(seed).share(part).held_out(self.config.data.held_out_batches)
        order = ClickOrder(store=self._store, batch_size=SCORING_BATCH, seed=seed, split=split)
        return (batch.to(self.device) for batch in order.share(part).cut())

    @cached_property
    def valid_rows(self) -> ScoredRows | None:
        """The validation rows with their users and items; None where each seed draws rows of its own."""
        return None if self._store is None else imported_rows(self._store)

    @cached_property
    def _catalogue(self) -> ClickCatalogue | None:
        return None if self._store is None else of_imported(self._store, SCORING_BATCH)

    def catalogue(self) -> ClickCatalogue | None:
        """The items that imported rows can be ranked among."""
        return self._catalogue

    def baseline_scorers(self) -> dict[str, Scorer]:
        return {} if self._catalogue is None else self._catalogue.rules()

    def strongest_feature(self) -> tuple[str, float] | None:
        return None if self._store is None else imported_strongest(self._store)

    def scored_rows(self) -> ScoredRows:
        if self.valid_rows is not None:
            return self.valid_rows
        return ScoredRows(torch.cat([batch.labels_B for batch in self.held_out(self.config.seed)]).cpu())

    def baseline_logits(self) -> dict[str, Tensor]:
        """The majority class of the training rows; for random batches also the logits that labels were drawn from, for
        imported clicks models of the same features."""
        if self._store is None:
            return synthetic_logits(self.bags(self.config.seed), self.config.data.held_out_batches)
        return imported_logits(self._store)
