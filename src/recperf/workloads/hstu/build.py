"""The sequences of hstu, from an event store or embedded, and a trial: the model, Adam, the order of its sequences, and
the ranks of held-out items.

Shapes: N targets, I items, D width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.next_item import NextItemData, PlantedSequences, Targets, digest_of
from ...data.next_item_batches import EventsOnDevice, SequenceBatch, SequenceOrder, WindowBatch, histories
from ...data.yambda.reference import open_events
from ...distributed.balance import stride
from ...distributed.ranks import current
from ...errors import DataError, MachineError, UsageError
from ...execution.tables import placed_tables
from ...execution.workload import Predictions, Prepared, RankedTargets, ScoredRows, Trial
from ...measure.cost import FLOAT, Cost
from ...models.next_item.config import step
from ...models.next_item.model import NextItemHSTU
from ...models.tables import SparseTables
from ...models.tiers.cache import TieredRows
from ...models.tiers.config import Tiers
from ...models.tiers.opening import open_tiers
from ...stop import poll
from ...tasks import NEXT_ITEM
from ...train.device import BETWEEN_RANKS, SWITCH, Settings, choose, choose_graph, free_gpu_bytes
from ...train.feeds import PlacedOrder
from ...train.graph import GraphStep
from ...train.loop import Order, Position, Recipe
from ...train.next_item import Ranked, baselines, item_counts, rank, seen_by_default
from ...train.optim import AdamW, SparseRows, SplitOptimizer
from ...train.ranking import list_quality
from ...units import size
from .. import division
from .config import HSTUConfig, SequencesConfig, bounds, estimate, require_room
from .steps import UsedItems, WindowFeed, WindowOrder

EMBEDDED_SEED = 7


def planted(config: SequencesConfig) -> PlantedSequences:
    return PlantedSequences(config.users, config.groups, config.group_items, EMBEDDED_SEED)


def read(config: SequencesConfig) -> NextItemData:
    if config.path is None:
        return planted(config).data()
    return NextItemData.from_store(open_events(config.path), config.split)


def check(config: HSTUConfig) -> str:
    """Check memory and data without training; the line names the data."""
    require_room(config)
    facts = SequenceSource(config).facts()
    return f"{facts['name']}, {facts['rows']:,} events, split {facts['split']}"


class SequenceSource:
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

    def model(self, seed: int, device: torch.device, tiers: Tiers) -> NextItemHSTU:
        """A new model; the features of items are no weights of it, and come from the data."""
        config = self.config.model
        values = self.data.values() if config.feature_rows else None
        rows = values.rows if values else 0
        if rows != config.feature_rows:
            what = f"the items of {self.data.name} have {rows:,} values of features"
            raise DataError(what, where={"field": "model.feature_rows"}, fix="leave --model.feature-rows out")
        table, opened = None, None
        if (rule := self.config.rule) is not None:
            if tiers.placement != "device":
                state = rule.state_width(config.dim)
                opened = open_tiers({"items": config.items + 1}, tiers, dim=config.dim, state=state, device=device)
            table = SparseTables(("items",), (config.items + 1,), config.dim, device=device, tiers=opened)
        return NextItemHSTU(config, seed=seed, device=device, values=values, rows=table)

    def facts(self) -> dict[str, Any]:
        """What a result records about the data."""
        store, events = self.data.store, len(self.data.items_E)
        note = "" if store is None or store.time_order == "time" else store.split_note
        times_E, moments = self.data.times_E, self.data.moments
        held_out_from = moments[1] if moments else int(times_E.max()) if times_E is not None else None
        return {
            **({} if held_out_from is None else {"held_out_from": held_out_from}),
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


BETAS = (0.9, 0.98)
"""Of AdamW, which has all but the rows of items that a table optimizer updates."""
ALL_ROWS = Tiers("device", 0, "device: adamw changes every row in every step")
ALL_USED = Tiers("device", 0, "device: the full softmax uses every row in every step")
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
        if config.rule is not None and current().choose(False, several=True):
            what = f"ranks of hstu update all items: {config.optimizer} and tables outside the device need a single "
            what += "process"
            raise UsageError(what, fix="--ranks 1, or --train.table-optimizer adamw --tables.placement device")
        require_room(config)
        self.config = config
        self.sequences = SequenceSource(config, data)
        self.data, self.target = self.sequences.facts(), bounds(config)
        self.settings = settings_of(config)
        self.tiers = ALL_ROWS if config.rule is None else ALL_USED
        if config.some_rows:
            self.tiers = placed_tables(config.tables, estimate(config), self.settings.device)
        self.settings.reasons["tables"] = self.tiers.why
        self._require_device_room()
        lack = "" if config.rule is None else "only the rows of items that a step uses are updated"
        why = "a step is hundreds of small kernels; batches are padded"
        self.graph, self.settings.reasons["graph"] = choose_graph(
            config.train.graph, self.settings.device, current().choose(lack, BETWEEN_RANKS), why=why, switch=SWITCH
        )
        self.events = EventsOnDevice(self.sequences.data, self.settings.device)

    def _require_device_room(self) -> None:
        """Items on the device have their optimizer's state and, if all are updated, a gradient, which a table optimizer
        gets with a copy of the rows. With adamw a graph copies what it has while it is captured."""
        device, copies = self.settings.device, 4 if self.config.train.graph == "off" else 6
        if self.config.rule is not None:
            copies = 1 + self.config.rule.weight_states + 2 * (not self.config.some_rows)
        table = copies * estimate(self.config).table_bytes
        if self.tiers.placement == "device" and device.type == "cuda" and table > free_gpu_bytes(device):
            what = f"the items take {size(table)} of the GPU, {size(free_gpu_bytes(device))} are free"
            raise MachineError(what, fix="--tables.placement host --model.loss sampled, or a smaller --model.dim")

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
        return step(self.config.model, int(lengths_B.sum()), pairs, unique, rule=self.config.rule)

    def table_bytes(self) -> tuple[int, int]:
        row = FLOAT * self.config.model.dim
        return row, row * (self.config.model.items + 1)


class SequenceTrial(Trial):
    """One model, its optimizer and the order of its sequences."""

    def __init__(self, prepared: PreparedSequences, seed: int) -> None:
        config, self.prepared, self.ranks = prepared.config, prepared, division(prepared)
        train = config.train
        self.model = prepared.sequences.model(seed, prepared.settings.device, prepared.tiers)
        blocks = list(self.model.blocks.parameters())
        tables = [one for name, one in self.model.named_parameters() if not name.startswith("blocks.")]
        groups = [(blocks, train.weight_decay), (tables, train.table_weight_decay)]
        self.optimizer: AdamW | SplitOptimizer = AdamW(groups, betas=BETAS)
        length = config.model.max_length
        order = SequenceOrder.of(
            prepared.sequences.data, prepared.events, length=length, batch_size=train.batch_size, seed=seed,
            all_windows=train.windows == "all",
        )  # fmt: skip
        used: Order = order
        if (items := self.model.items) is not None and config.rule is not None:
            prepared.settings.reasons["bag"] = items.why
            rows = SparseRows(items, config.rule.name, decay=train.table_weight_decay)
            self.optimizer = SplitOptimizer(self.optimizer, rows, table_ratio=train.table_ratio)
            used = UsedItems(order, config.model)
            if items.tiers is not None:
                used = PlacedOrder(used, items, prepared.settings.device)
        self.recipe = Recipe(
            model=self.model,
            optimizer=self.optimizer,
            order=used,
            learning_rate=lambda step: train.learning_rate,
            epochs=train.epochs,
            max_steps=train.max_steps,
            patience=train.patience,
        )
        if prepared.graph:
            self.recipe = replace(self.recipe, order=WindowOrder(order), whole_step=self._whole_step(order))
        self.recipe = self.ranks.sequences(self.recipe, self.model)

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
    def score(self, targets: Targets, vectors_ID: Tensor | None = None) -> Tensor:
        """Scores of all items, by their vectors, for the history before each target."""
        prepared, vectors_ID = self.prepared, self.model.item_vectors() if vectors_ID is None else vectors_ID
        length, parts = prepared.config.model.max_length, []
        for batch in histories(
            prepared.sequences.data, prepared.events, targets, length=length, batch_size=SCORING_BATCH
        ):
            poll()
            parts.append(self.model.last(batch) @ vectors_ID.t())
        return torch.cat(parts)

    @torch.no_grad()
    def ranked(self, targets: Targets) -> Ranked:
        """The ranks of targets; of several processes each ranks its share."""
        vectors_ID, world = self.model.item_vectors(), current()
        parts = stride(len(targets), world.size)
        own = Targets(targets.users_N[parts[world.rank]], targets.positions_N[parts[world.rank]])
        ranked = self.prepared.ranks(own, lambda part: self.score(part, vectors_ID))
        order_N = torch.from_numpy(np.argsort(np.concatenate(parts)))
        gathered = zip(*world.all_gather((ranked.ranks_N, ranked.lists_NK)))
        ranks_N, lists_NK = (torch.cat(columns)[order_N] for columns in gathered)
        return Ranked(ranks_N, lists_NK, ranked.seen)

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
        return {**scored, NEXT_ITEM.choosing: validation.metrics()[NEXT_ITEM.leading]}

    def rows_of(self, batch: SequenceBatch | WindowBatch) -> Tensor:
        if isinstance(batch, WindowBatch):
            batch = batch.gathered()
        table, features = self.model.items, batch.features
        return batch.items_T if table is None or features is None else table.rows_of(features)

    def tiers(self) -> TieredRows | None:
        return None if self.model.items is None else self.model.items.tiers

    def tables(self) -> list[tuple[str, int]]:
        return [("items", self.prepared.config.model.items + 1)]

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.model.items is not None:
            # A run that is resumed may use other implementations than a new one.
            self.prepared.settings.reasons["bag"] = self.model.items.why
