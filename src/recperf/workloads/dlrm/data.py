"""The batches of dlrm: drawn at random, or read from a Criteo click log or a user's imported clicks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import to_json
from ...data.batch import ClickBatch
from ...data.click_store.imported import ImportedClicks, open_clicks
from ...data.click_store.order import ClickOrder
from ...data.criteo.config import DENSE, KEYS
from ...data.criteo.convert import find
from ...data.criteo.store import CriteoStore
from ...data.criteo.store import describe as describe_criteo
from ...data.order import WHOLE, RankPart
from ...data.random_bags import RandomBags
from ...data.random_config import read_profile
from ...errors import ConfigError
from ...execution.tables import Lookups
from ...execution.workload import ScoredRows, describe_synthetic
from ...train.baselines import majority, synthetic_logits
from ...train.loop import Order
from ..click_candidates import ClickCatalogue, of_imported
from ..clicks import (
    SCORING_BATCH,
    click_lookups,
    imported_facts,
    imported_logits,
    imported_rows,
    imported_strongest,
    require_tables,
)
from .config import DLRMWorkloadConfig, require_room, table_state


def check(config: DLRMWorkloadConfig) -> str:
    """Check the data without reading all of it, and the memory where a CPU will train; the line names the data."""
    if config.train.device == "cpu" or not Path("/dev/nvidia0").exists():
        require_room(config)
    _require_readable(config)
    if config.data.source == "random":
        return f"synthetic batches, {config.data.ids} ids"
    if config.data.source == "clicks":
        facts = imported(config).describe()
        return f"{facts['name']}, {facts['rows']:,} rows, split {facts['split']}"
    log = find(config.data.criteo(config.dlrm.rows))
    state = f"{log.rows:,} rows, already converted" if log.complete else "to be converted first"
    return f"Criteo log {config.data.path}, {state}"


def _require_readable(config: DLRMWorkloadConfig) -> None:
    """Refuse a profile that cannot be read, or a model that does not fit Criteo's columns."""
    if config.data.source == "random":
        if config.data.profile is not None:
            read_profile(config.data.profile, dict(zip(config.dlrm.features, config.dlrm.rows)))
    elif config.data.source == "clicks":
        require_tables(config.dlrm, imported(config))
    elif len(config.model.rows) != len(KEYS) or config.model.bottom[0] != DENSE:
        raise ConfigError(
            f"Criteo has {DENSE} dense features and {len(KEYS)} tables, the model {config.model.bottom[0]} and "
            f"{len(config.model.rows)}",
            where={"field": "model.rows, model.bottom"},
            fix="--preset criteo-kaggle",
        )


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
    """Random batches, a Criteo log or imported clicks, opened."""

    def __init__(self, config: DLRMWorkloadConfig) -> None:
        _require_readable(config)
        self.config, self.model = config, config.dlrm
        self.drawn = config.data.source == "random"
        self._store: CriteoStore | ImportedClicks | None = None
        if config.data.source == "clicks":
            self._store = imported(config)
        elif config.data.source == "criteo":
            self._store = CriteoStore.open(config.data.criteo(self.model.rows))

    def facts(self) -> dict[str, Any]:
        """What a result records about the data."""
        if isinstance(self._store, ImportedClicks):
            return imported_facts(self._store)
        if self._store is not None:
            return describe_criteo(self._store)
        data, batch = self.config.data, self.config.train.batch_size
        parts = {"data": to_json(data), "seed": self.config.seed, "batch": batch, "rows": self.model.rows}
        if data.profile is not None:
            parts["profile"] = hashlib.sha256(data.profile.read_bytes()).hexdigest()
        return describe_synthetic(f"synthetic {data.ids} ids", data, batch, parts)

    def verified(self) -> dict[str, int] | None:
        return None if self._store is None else self._store.verified()

    def bags(self, seed: int, device: torch.device | str) -> RandomBags:
        return RandomBags(
            keys=self.model.features,
            rows=self.model.rows,
            dense=self.model.dense,
            batch_size=self.config.train.batch_size,
            seed=seed,
            device=str(device),
            config=self.config.data,
        )

    def host_order(self, seed: int) -> RandomBags | ClickOrder:
        if self._store is None:
            return self.bags(seed, "cpu")
        return ClickOrder(store=self._store, batch_size=self.config.train.batch_size, seed=seed)

    def order(self, seed: int, device: torch.device, input: str) -> Order:
        """Batches on the device that trains: drawn there, or made on the host and copied."""
        if device.type == "cpu":
            return self.host_order(seed)
        if self.drawn and input == "device":
            return self.bags(seed, device)
        return CopiedOrder(self.host_order(seed), device, input == "pinned")

    def held_out(self, seed: int, device: torch.device, part: RankPart = WHOLE) -> Iterable[ClickBatch]:
        if self._store is None:
            return self.bags(seed, device).share(part).held_out(self.config.data.held_out_batches)
        return (batch.to(device) for batch in self._scoring_order(seed, self._store).share(part).cut())

    def held_out_samples(self, number: int) -> int:
        """Samples of a held-out batch, those of all ranks together."""
        if self._store is None:
            return self.config.train.batch_size
        return self._scoring_order(0, self._store).whole_samples(number)

    def _scoring_order(self, seed: int, store: CriteoStore | ImportedClicks) -> ClickOrder:
        return ClickOrder(store=store, batch_size=SCORING_BATCH, seed=seed, split="valid")

    @cached_property
    def catalogue(self) -> ClickCatalogue | None:
        """The items that imported rows can be ranked among."""
        return of_imported(self._store, SCORING_BATCH) if isinstance(self._store, ImportedClicks) else None

    def strongest_feature(self) -> tuple[str, float] | None:
        return imported_strongest(self._store) if isinstance(self._store, ImportedClicks) else None

    def scored_rows(self, seed: int, device: torch.device) -> ScoredRows:
        """Of rows drawn on a device, or read on the host."""
        if isinstance(self._store, ImportedClicks):
            return imported_rows(self._store)
        held_out = self.held_out(seed, device if self.drawn else torch.device("cpu"))
        return ScoredRows(torch.cat([batch.labels_B for batch in held_out]).cpu())

    def baseline_logits(self, seed: int, device: torch.device) -> dict[str, Tensor]:
        """The majority class of the training rows; for random batches the logits that labels were drawn from; for
        imported clicks also models of the same features."""
        if self._store is None:
            return synthetic_logits(self.bags(seed, device), self.config.data.held_out_batches)
        if isinstance(self._store, ImportedClicks):
            return imported_logits(self._store)
        return {"majority": majority(self._store.click_rate("train"), self.facts()["valid_rows"])}


def lookups(config: DLRMWorkloadConfig) -> Lookups:
    """The rows of the training batches."""
    model = config.dlrm
    if config.train.optimizer == "adamw":
        raise ConfigError(
            "adamw changes every row of the tables in every step, so that all of them are always in use",
            where={"field": "train.optimizer"},
            fix="--train.optimizer rowwise-adagrad",
        )
    source = ClickSource(config)
    tables = dict(zip(model.features, model.rows))
    return click_lookups(
        config,
        source.host_order(config.seed),
        data=source.facts()["name"],
        tables=tables,
        numbers=model.dim + table_state(config),
        rows_of=lambda features: [features[key][0] for key in features.keys],
    )
