"""A trial of hstu: the model, Adam, the order of its sequences, and the ranks of held-out items.

Shapes: N targets, B sequences of a batch, I items.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.next_item import NextItemData, Targets
from ...data.next_item_batches import EventsOnDevice, SequenceBatch, SequenceOrder, WindowBatch, histories
from ...distributed.ranks import current
from ...errors import MachineError
from ...execution.workload import Predictions, Prepared, RankedTargets, ScoredRows
from ...measure.cost import FLOAT, Cost
from ...models.next_item.config import step
from ...stop import poll
from ...train.config import RANKED
from ...train.device import BETWEEN_RANKS, SWITCH, Settings, choose, choose_graph, free_gpu_bytes
from ...train.graph import GraphStep
from ...train.loop import Position, Recipe
from ...train.next_item import Ranked, baselines, item_counts, rank, seen_by_default
from ...train.optim import AdamW
from ...train.ranking import list_quality
from ...units import size
from .batches import WindowFeed, WindowOrder
from .config import HSTUConfig, bounds, estimate, require_room
from .data import Sequences

BETAS = (0.9, 0.98)
SCORING_BATCH = 512
"""Histories that are encoded at a time."""


def settings_of(config: HSTUConfig) -> Settings:
    model = config.model
    product = 2 * config.train.batch_size * model.max_length * model.dim * 4 * model.width
    settings = choose(config.train, largest_product_flops=product)
    return replace(settings, precision="tf32") if settings.device.type == "cuda" else settings


class PreparedSequences(Prepared):
    """Sequences, all on the device that trains, and what ranks their held-out items. `data` are the sequences where
    they come from elsewhere than the config says."""

    def __init__(self, config: HSTUConfig, data: NextItemData | None = None) -> None:
        require_room(config)
        self.config = config
        self.sequences = Sequences(config, data)
        self.data, self.target = self.sequences.facts(), bounds(config)
        self.settings = settings_of(config)
        self._require_device_room()
        why = "a step is hundreds of small kernels; batches are padded"
        self.graph, self.settings.reasons["graph"] = choose_graph(
            config.train.graph, self.settings.device, current().choose("", BETWEEN_RANKS), why=why, switch=SWITCH
        )
        self.events = EventsOnDevice(self.sequences.data, self.settings.device)

    def _require_device_room(self) -> None:
        """All items lie on the device, with a gradient and Adam's two numbers for each of theirs, which are copied
        while a graph is captured."""
        device, copies = self.settings.device, 4 if self.config.train.graph == "off" else 6
        table = copies * estimate(self.config).table_bytes
        if device.type == "cuda" and table > free_gpu_bytes(device):
            free = size(free_gpu_bytes(device))
            what = f"the items take {size(table)} of the GPU, {free} are free: hstu has no table outside the device"
            raise MachineError(what, fix="a smaller --model.dim, or --train.device cpu")

    @cached_property
    def seen(self) -> Any:
        """Whether items of a history compete."""
        asked = self.config.data.seen
        return seen_by_default(self.sequences.data) if asked == "auto" else asked

    @cached_property
    def item_events(self) -> NDArray[np.int64]:
        """Training events of each item."""
        return item_counts(self.sequences.data)

    def ranks(self, targets: Targets, score: Any) -> Ranked:
        return rank(self.sequences.data, targets, score, seen=self.seen)

    def ranking(self) -> RankedTargets:
        def ranked() -> dict[str, Tensor]:
            rules = {**self.sequences.oracle(), **baselines(self.sequences.data)}
            return {name: self.ranks(self.sequences.test, rule).ranks_N for name, rule in rules.items()}

        return RankedTargets(
            users_N=torch.from_numpy(self.sequences.test.users_N),
            catalogue=self.sequences.data.items,
            repeats=self.seen == "kept",
            split=self.config.data.split,
            baseline_ranks=ranked,
        )

    def scored_rows(self) -> ScoredRows:
        return ScoredRows(torch.ones(len(self.sequences.test)), torch.from_numpy(self.sequences.test.users_N))

    def baseline_logits(self) -> dict[str, Tensor]:
        """Nothing is labelled: `ranking` has the baselines."""
        return {}

    def trial(self, seed: int) -> SequenceTrial:
        return SequenceTrial(self, seed)

    def verified(self) -> dict[str, int] | None:
        store = self.sequences.data.store
        return store.verified() if store else None

    def step_cost(self, batch: SequenceBatch | WindowBatch, ids: int, unique: int) -> dict[str, Cost]:
        lengths_B = batch.lengths_B
        pairs = int((lengths_B * (lengths_B + 1) // 2).sum())
        return step(self.config.model, int(lengths_B.sum()), pairs, unique)

    def table_bytes(self) -> tuple[int, int]:
        row = FLOAT * self.config.model.dim
        return row, row * (self.config.model.items + 1)


class SequenceTrial:
    """One model, its optimizer and the order of its sequences."""

    def __init__(self, prepared: PreparedSequences, seed: int) -> None:
        config, self.prepared = prepared.config, prepared
        train = config.train
        self.model = prepared.sequences.model(seed, prepared.settings.device)
        blocks = list(self.model.blocks.parameters())
        tables = [one for name, one in self.model.named_parameters() if not name.startswith("blocks.")]
        groups = [(blocks, train.weight_decay), (tables, train.table_weight_decay)]
        self.optimizer = AdamW(groups, betas=BETAS)
        length = config.model.max_length
        order = SequenceOrder.of(
            prepared.sequences.data, prepared.events, length=length, batch_size=train.batch_size, seed=seed,
            all_windows=train.windows == "all",
        )  # fmt: skip
        self.recipe = Recipe(
            model=self.model,
            optimizer=self.optimizer,
            order=order,
            learning_rate=lambda step: train.learning_rate,
            epochs=train.epochs,
            max_steps=train.max_steps,
            patience=train.patience,
        )
        if prepared.graph:
            self.recipe = replace(self.recipe, order=WindowOrder(order), whole_step=self._whole_step(order))

    def _whole_step(self, order: SequenceOrder) -> GraphStep:
        settings = self.prepared.settings
        return GraphStep(
            self.model,
            self.optimizer,
            WindowFeed(order),
            device=settings.device,
            reasons=settings.reasons,
            requested_by=SWITCH if self.prepared.config.train.graph == "on" else None,
        )

    @torch.no_grad()
    def score(self, targets: Targets) -> Tensor:
        """Scores of all items for the history before each target."""
        prepared, vectors_ID = self.prepared, self.model.item_vectors()
        length, parts = prepared.config.model.max_length, []
        for batch in histories(
            prepared.sequences.data, prepared.events, targets, length=length, batch_size=SCORING_BATCH
        ):
            poll()
            parts.append(self.model.last(batch) @ vectors_ID.t())
        return torch.cat(parts)

    def ranked(self, targets: Targets) -> Ranked:
        return self.prepared.ranks(targets, self.score)

    def predictions(self, at: Position | None = None) -> Predictions:
        """The ranks of the test items."""
        test = self.prepared.sequences.test
        ranked, none = self.ranked(test), torch.zeros(0)
        lists = list_quality(ranked.lists_NK, self.prepared.sequences.data.items, self.prepared.item_events)
        return Predictions(none, none, torch.from_numpy(test.users_N), ranks_N=ranked.ranks_N, lists=lists)

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        """Of the test items, and of the validation items, by which the epoch is chosen."""
        assert predictions.ranks_N is not None
        validation = self.ranked(self.prepared.sequences.validation)
        scored = self.prepared.ranking().metrics(predictions.ranks_N)
        return {**scored, RANKED: validation.metrics()["ndcg_10"]}

    def candidate_logits(self, rows_P: Tensor, items_P: Tensor) -> Tensor:
        raise NotImplementedError("hstu ranks all items at once")

    def rows_of(self, batch: SequenceBatch | WindowBatch) -> Tensor:
        return (batch.gathered() if isinstance(batch, WindowBatch) else batch).items_T

    def tables(self) -> list[tuple[str, int]]:
        return [("items", self.prepared.config.model.items + 1)]

    def tiers(self) -> None:
        """All items lie on the device."""

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
