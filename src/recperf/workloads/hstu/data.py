"""The sequences of hstu: from an event store, or embedded ones, with what is said about them and what ranks them.

Shapes: N targets, I items.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.next_item import NextItemData, PlantedSequences, Targets, digest_of
from ...data.yambda.reference import open_events
from ...errors import DataError
from ...models.next_item.model import NextItemHSTU
from .config import HSTUConfig, SequencesConfig, require_room


def planted(config: SequencesConfig) -> PlantedSequences:
    return PlantedSequences(config.users, config.groups, config.group_items, config.embedded_seed)


def read(config: SequencesConfig) -> NextItemData:
    if config.path is None:
        return planted(config).data()
    return NextItemData.from_store(open_events(config.path), config.split)


def check(config: HSTUConfig) -> str:
    """Check memory and data without training; the line names the data."""
    require_room(config)
    facts = Sequences(config).facts()
    return f"{facts['name']}, {facts['rows']:,} events, split {facts['split']}"


class Sequences:
    """The data of a config, whose items must be those of the model."""

    def __init__(self, config: HSTUConfig, data: NextItemData | None = None) -> None:
        self.config, self.data = config, data or read(config.data)
        if self.data.items != config.model.items:
            what = f"the model has {config.model.items:,} items, {self.data.name} has {self.data.items:,}"
            raise DataError(what, where={"field": "model.items"}, fix=f"--model.items {self.data.items}")
        self.train, self.test = self.data.train(), self.data.test()
        if not len(self.test) or not len(self.train):
            what = f"{self.data.name} has no user with an item to train on and one to predict"
            raise DataError(what, fix="import events of users with at least three items")

    def model(self, seed: int, device: torch.device) -> NextItemHSTU:
        """A new model; the features of items are no weights of it, and come from the data."""
        values = self.data.values() if self.config.model.feature_rows else None
        rows = values.rows if values else 0
        if rows != self.config.model.feature_rows:
            what = f"the items of {self.data.name} have {rows:,} values of features"
            raise DataError(what, where={"field": "model.feature_rows"}, fix="leave --model.feature-rows out")
        return NextItemHSTU(self.config.model, seed=seed, device=device, values=values)

    def facts(self) -> dict[str, Any]:
        """What a result records about the data."""
        store, events = self.data.store, len(self.data.items_E)
        note = "" if store is None or store.time_order == "time" else store.split_note
        return {
            "name": self.data.name,
            "digest": digest_of(self.data) if store is None else store.digest,
            "rows": events,
            "train_rows": int((self.train.ends_S - self.train.begins_S).sum()),
            "valid_rows": len(self.test),
            "split": f"{self.config.data.split}{note}",
            "synthetic": store is None or store.synthetic,
        }

    @cached_property
    def validation(self) -> Targets:
        """Those that choose the epoch: of some users, the same ones in every run."""
        targets, most = self.data.validation(), self.config.data.validation_users
        if not 0 < most < len(targets):
            return targets
        places = np.sort(np.random.default_rng(len(targets)).permutation(len(targets))[:most])
        return Targets(targets.users_N[places], targets.positions_N[places])

    def oracle(self) -> dict[str, Any]:
        """The true probabilities of embedded sequences as a rule that ranks; none for other data."""
        if self.config.data.path is not None:
            return {}
        truth = planted(self.config.data)

        def score(targets: Targets) -> Tensor:
            return torch.from_numpy(truth.scores(self.data, targets))

        return {"planted": score}
