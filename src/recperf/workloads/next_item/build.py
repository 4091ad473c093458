"""A trial of hstu: the model, Adam and the order of its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...data.next_item import NextItemData, Targets
from ...data.next_item_batches import EventsOnDevice, SequenceBatch, SequenceOrder, WindowBatch, histories
from ...distributed.ranks import current
from ...errors import DataError, MachineError, UsageError
from ...execution.tables import placed_tables
from ...execution.workload import Predictions
from ...measure.cost import FLOAT, Cost
from ...models.next_item.config import step
from ...models.next_item.counting import MODEL
from ...models.next_item.model import NextItemModel
from ...models.tables import SparseTables
from ...models.tiers.cache import TieredRows
from ...models.tiers.config import Tiers
from ...models.tiers.opening import open_tiers
from ...tasks import NEXT_ITEM
from ...train.counting import COUNTS, Candidates, counted, fit, take_over
from ...train.device import BETWEEN_RANKS, SWITCH, Settings, choose, choose_graph, free_gpu_bytes
from ...train.feeds import PlacedOrder
from ...train.graph import GraphStep
from ...train.loop import Order, Position, Recipe
from ...train.next_item import together
from ...train.optim import AdamW, SparseRows, SplitOptimizer
from ...units import size
from .. import division
from .config import NextItemRunConfig, bounds, estimate, require_room
from .data import SCORING_BATCH, RankedSequences, RankedTrial, SequenceSource
from .steps import UsedItems, WindowFeed, WindowOrder


def check(config: NextItemRunConfig) -> str:
    """Check memory and data without training; the line names the data."""
    require_room(config)
    return sequences_of(config).describe()


def sequences_of(config: NextItemRunConfig, data: NextItemData | None = None) -> SequenceSource:
    """The sequences of a config, whose items must be those of the model."""
    sequences = SequenceSource(config.data, data)
    name, items = sequences.data.name, sequences.data.items
    if items != config.model.items:
        what = f"the model has {config.model.items:,} items, {name} has {items:,}"
        raise DataError(what, where={"field": "model.items"}, fix=f"--model.items {items}")
    return sequences


def new_model(
    config: NextItemRunConfig, data: NextItemData, seed: int, settings: Settings, tiers: Tiers
) -> NextItemModel:
    """A new model; the features of items are no weights of it, and come from the data."""
    model, device = config.model, settings.device
    values = data.values() if model.feature_rows else None
    rows = values.rows if values else 0
    if rows != model.feature_rows:
        what = f"the items of {data.name} have {rows:,} values of features"
        raise DataError(what, where={"field": "model.feature_rows"}, fix="leave --model.feature-rows out")
    table, opened = None, None
    if (rule := config.rule) is not None:
        if tiers.placement != "device":
            state = rule.state_width(model.dim)
            opened = open_tiers({"items": model.items + 1}, tiers, dim=model.dim, state=state, device=device)
        table = SparseTables(("items",), (model.items + 1,), model.dim, device=device, tiers=opened)
    low = settings.precision == "bfloat16"
    return NextItemModel(model, seed=seed, device=device, values=values, rows=table, low=low)


BETAS = (0.9, 0.98)
"""Of AdamW, which has all but the rows of items that a table optimizer updates."""
ALL_ROWS = Tiers("device", 0, "device: adamw changes every row in every step")
ALL_USED = Tiers("device", 0, "device: the full softmax uses every row in every step")


def settings_of(config: NextItemRunConfig) -> Settings:
    model = config.model
    product = 2 * config.train.batch_size * model.max_length * model.dim * 4 * model.width
    settings = choose(config.train, largest_product_flops=product)
    precision, on_gpu = config.train.precision, settings.device.type == "cuda"
    if precision == "tf32" and not on_gpu:
        raise MachineError("a CPU has no tf32", fix="--train.precision float32")
    if precision == "auto":
        precision = ("bfloat16" if config.low else "tf32") if on_gpu else "float32"
    return replace(settings, precision=precision)


class PreparedSequences(RankedSequences):
    """Sequences, all on the device that trains, and what ranks their held-out items. `data` are the sequences where
    they come from elsewhere than the config says."""

    def __init__(self, config: NextItemRunConfig, data: NextItemData | None = None) -> None:
        if config.rule is not None and current().choose(False, several=True):
            what = f"ranks of hstu update all items: {config.optimizer} and tables outside the device need a single "
            what += "process"
            raise UsageError(what, fix="--ranks 1, or --train.table-optimizer adamw --tables.placement device")
        require_room(config)
        self.config, self.length = config, config.model.max_length
        self.sequences = sequences_of(config, data)
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
        copies += self.config.averaged_steps > 0
        if self.config.rule is not None:
            copies = 1 + self.config.rule.weight_states + 2 * (not self.config.some_rows)
        ranks = current().size if self.config.distributed.sharding else 1
        table = copies * estimate(self.config).table_bytes // ranks
        if self.tiers.placement == "device" and device.type == "cuda" and table > free_gpu_bytes(device):
            what = f"the items take {size(table)} of the GPU, {size(free_gpu_bytes(device))} are free"
            raise MachineError(what, fix="--tables.placement host --model.loss sampled, or a smaller --model.dim")

    def trial(self, seed: int) -> SequenceTrial:
        return SequenceTrial(self, seed)

    def step_cost(self, batch: SequenceBatch | WindowBatch, ids: int, unique: int) -> dict[str, Cost]:
        lengths_B = batch.lengths_B
        pairs = int((lengths_B * (lengths_B + 1) // 2).sum())
        tokens, gpu = int(lengths_B.sum()), self.settings.device.type == "cuda"
        how = {"low": self.settings.precision == "bfloat16", "averaged": self.config.averaged_steps > 0}
        return step(self.config.model, tokens, pairs, unique, rule=self.config.rule, gpu=gpu, **how)

    def table_bytes(self) -> tuple[int, int]:
        row = FLOAT * self.config.model.dim
        return row, row * (self.config.model.items + 1)


class SequenceTrial(RankedTrial):
    """One model, its optimizer and the order of its sequences."""

    def __init__(self, prepared: PreparedSequences, seed: int) -> None:
        config, self.prepared, self.ranks = prepared.config, prepared, division(prepared)
        train = config.train
        self.model = new_model(config, prepared.sequences.data, seed, prepared.settings, prepared.tiers)
        self.shards = self.ranks.catalogue(self.model)
        self.known: dict[str, float] = {}
        """NDCG@10 of the validation items by the model alone and by counting alone."""
        if config.model.counts == "on":
            sequences, started = prepared.sequences, config.start.run is not None
            rules = {name: make() for name, make in prepared.baselines.items()}
            counts = counted(sequences.data, rules, sequences.seen, started=started)
            self.model.counting = counts.to(prepared.settings.device)
        blocks = list(self.model.blocks.parameters())
        tables = [one for name, one in self.model.named_parameters() if not name.startswith("blocks.")]
        groups = [(blocks, train.weight_decay), (tables, train.table_weight_decay)]
        self.dense = AdamW(groups, betas=BETAS, average_steps=config.averaged_steps)
        self.optimizer: AdamW | SplitOptimizer = self.dense
        self.model.exchange = self.dense.exchange
        order = prepared.order(seed)
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
            evaluate_epochs=train.evaluate_epochs,
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

    def last(self, batch: SequenceBatch) -> Tensor:
        return self.model.last(batch)

    @property
    def by_products(self) -> bool:
        return self.model.counting is None

    def scored(self, products_BI: Tensor, batch: SequenceBatch) -> Tensor:
        return products_BI if self.model.counting is None else self.model.scored(products_BI, batch)

    def predictions(self, at: Position | None = None) -> Predictions:
        """The ranks of the test items, once the weights of counting are those for the present model."""
        self.fit_counting()
        return super().predictions(at)

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        known = {f"{NEXT_ITEM.choosing}_{name}": value for name, value in self.known.items()}
        return {**super().metrics(predictions), **known}

    @torch.no_grad()
    def fit_counting(self) -> None:
        """Fit the weights of the model's and the counted parts on the validation targets; ranks use those of the
        first."""
        counting, prepared = self.model.counting, self.prepared
        if counting is None:
            return
        data, targets = prepared.sequences.data, prepared.sequences.validation
        vectors_ID, held = self.item_vectors(), min(SCORING_BATCH, together(data, prepared.settings.device))

        def scored() -> Iterator[tuple[Targets, Tensor, SequenceBatch]]:
            batches = histories(data, prepared.events, targets, length=prepared.length, batch_size=held)
            for number, batch in enumerate(batches):
                part = slice(number * held, (number + 1) * held)
                logits_BI = self.last(batch) @ vectors_ID.t() / self.model.config.temperature
                yield targets[part], logits_BI, batch

        known = fit(counting, lambda: Candidates.of(counting, data, scored(), prepared.sequences.seen))
        self.known = {name: known[name] for name in (MODEL, COUNTS)}
        weights = [counting.weights_CP, counting.means_C, counting.scales_C]
        for into, value in zip(weights, current().all_gather([one.cpu() for one in weights])[0]):
            into.copy_(value)

    def item_vectors(self) -> Tensor:
        return self.model.item_vectors()

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
        state = self._exchanged({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        return state if self.shards is None else self.shards.whole_state(state, self._divided_tensors())

    def _divided_tensors(self) -> list[Tensor]:
        """The rows of items that are this rank's, their moments and their average."""
        items, group = self.model.items_ID, self.dense.groups[1]
        place = next(at for at, one in enumerate(group.parameters) if one is items)
        averages = [one for of, one in zip(self.dense.parameters, self.dense.averages) if of is items]
        return [items.detach(), group.means[place], group.squares[place], *averages]

    def _exchanged(self, state: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint has the averages as the model's weights, and those that training goes on with beside them."""
        if not self.dense.averages or not self.model.training:
            return state
        names = {id(one): name for name, one in self.model.named_parameters()}
        model, averages = {**state["model"]}, [*state["optimizer"]["averages"]]
        for place, parameter in enumerate(self.dense.parameters):
            name = names[id(parameter)]
            model[name], averages[place] = averages[place], model[name]
        return {"model": model, "optimizer": {**state["optimizer"], "averages": averages}}

    def take_over(self, saved: dict[str, Tensor], rows: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for parameter, average in zip(self.dense.parameters, self.dense.averages):
            parameter.data.copy_(average)
        if self.model.counting is not None:
            take_over(self.model.counting, saved, rows["items"])

    def restore(self, state: dict[str, Any]) -> None:
        if self.shards is not None:
            here = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            state = self.shards.part_state(state, here, self._divided_tensors())
        if self.dense.averages:
            # What was read may lie in the weights themselves.
            averages = [one.clone() for one in state["optimizer"]["averages"]]
            model = {name: one.clone() for name, one in state["model"].items()}
            state = self._exchanged({"model": model, "optimizer": {**state["optimizer"], "averages": averages}})
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.model.items is not None:
            # A run that is resumed may use other implementations than a new one.
            self.prepared.settings.reasons["bag"] = self.model.items.why
