"""A trial of dlrm: the model, its optimizer and the order of its batches, as the switches say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...data.batch import ClickBatch, JaggedFeatures
from ...data.order import ClickOrder
from ...data.random_bags import RandomBags
from ...data.rows.imported import ImportedClicks, open_clicks
from ...distributed.ranks import current
from ...errors import MachineError
from ...execution.tables import placed_tables, table_share
from ...machine import bfloat16_instructions
from ...measure.cost import FLOAT, Cost
from ...measure.fixes import Fix
from ...models.config import dlrm_step, sparse_dlrm_step
from ...models.dlrm import DLRM, Dot, Interaction, make_interaction
from ...models.embeddings import Embeddings, StackedTables
from ...models.mlp import Arithmetic, FastArithmetic, make_loss
from ...models.streams import SideStreams
from ...models.tables import SparseTables
from ...models.tiers.config import Tiers
from ...models.tiers.opening import open_tiers
from ...ops import dot, mlp
from ...train.config import make_schedule
from ...train.device import (
    BETWEEN_RANKS,
    FAST_SWITCH,
    SLOTS_ON_HOST,
    Settings,
    choose,
    cpu_fixes,
    free_gpu_bytes,
    resolve,
)
from ...train.feeds import CopiedFeed, DrawnBatch, DrawnFeed, DrawnOrder, Feed, PlacedOrder
from ...train.graph import GraphStep
from ...train.loop import Optimizer, Order, Recipe
from ...train.optim import SparseRows, SplitOptimizer, make_dense
from ...units import size
from .. import division
from ..clicks import CopiedOrder, DLRMTrialState, DrawnRows, PreparedRows, StoredRows, largest_product
from ..micro_dlrm.config import describe, require_tables
from .config import (
    LESS,
    DLRMWorkloadConfig,
    bounds,
    estimate,
    max_ids,
    planned,
    reduction_bytes,
    require_room,
    table_state,
)


class ConfiguredDLRM:
    """A config with the device and the switches that it resolves to, and the model that they make."""

    def __init__(self, config: DLRMWorkloadConfig) -> None:
        self.config, self.model = config, config.dlrm
        product = largest_product(self.model, config.train.batch_size)
        settings = choose(config.train, largest_product_flops=product)
        self.tiers = Tiers("device", 0, "device: adamw changes every row in every step")
        if config.train.optimizer != "adamw":
            share = table_share(planned(config), config.distributed, on_host=False)
            self.tiers = placed_tables(config.tables, estimate(config), settings.device, share=share)
        self._require_room(settings.device)
        self.switches = resolve(
            config.fast,
            settings.device,
            drawn=self.drawn,
            slices=config.train.micro_batches,
            optimizer=config.train.optimizer,
            lack=current().choose("" if self.tiers.placement == "device" else SLOTS_ON_HOST, several=BETWEEN_RANKS),
        )
        reasons = {**settings.reasons, **self.switches.reasons, "tables": self.tiers.why}
        if settings.device.type == "cpu" and self.switches.precision == "bfloat16":
            onednn, reasons["onednn"] = _onednn_of_bfloat16(config.train.onednn)
            settings = replace(settings, onednn=onednn)
        self.settings: Settings = replace(settings, precision=self.switches.precision, reasons=reasons)

    @property
    def drawn(self) -> bool:
        """Whether batches are drawn at random."""
        return self.config.data.source == "random"

    def bags(self, seed: int) -> RandomBags:
        config, model = self.config, self.model
        return RandomBags(
            keys=model.features, rows=model.rows, dense=model.dense, batch_size=config.train.batch_size, seed=seed,
            device=str(self.settings.device), config=config.data,
        )  # fmt: skip

    def rows(self) -> DrawnRows | StoredRows:
        if self.drawn:
            return DrawnRows(self.bags, f"synthetic {self.config.data.ids} ids", self.config, rows=self.model.rows)
        return StoredRows(readable(self.config), self.settings.device)

    def _require_room(self, device: torch.device) -> None:
        """Refuse a config that does not fit into the memory of the device."""
        if device.type == "cpu":
            require_room(self.config)
            return
        counted, more = estimate(self.config), reduction_bytes(self.config)
        share = table_share(planned(self.config), self.config.distributed, on_host=False)
        needed = sum(counted.memory.values()) - (1 - share) * counted.table_bytes + more
        if self.tiers.placement != "device":
            needed += self.tiers.cache_bytes - share * counted.table_bytes - counted.state_bytes
        free = free_gpu_bytes()
        if needed > free:
            raise MachineError(f"{size(needed)} are needed, {size(free)} are free on the GPU", fix=LESS)

    def make_model(self, seed: int, streams: SideStreams, embeddings: Embeddings | None = None) -> DLRM:
        """Builds the model by the switches."""
        config, device = self.config, self.settings.device
        return DLRM(
            self.model,
            seed=seed,
            embeddings=embeddings or self._embeddings(device, streams),
            interaction=self._interaction(device),
            loss=make_loss(config.train.loss, config.train.loss_weights),
            arithmetic=self._arithmetic(device, streams),
        ).to(device)

    def _embeddings(self, device: torch.device, streams: SideStreams) -> Embeddings:
        config, model, reasons, tiers = self.config, self.model, self.settings.reasons, None
        if config.train.optimizer == "adamw":
            reasons["bag"] = "torch: adamw updates every row, so the tables have a dense gradient"
            return StackedTables(model.features, model.rows, model.dim)
        bag: Any = "auto" if self.switches.embedding else "reference"
        if self.tiers.placement != "device":
            rows, state = dict(zip(model.features, model.rows)), table_state(config)
            tiers = open_tiers(rows, self.tiers, dim=model.dim, state=state, device=device)
        tables = SparseTables(model.features, model.rows, model.dim, bag=bag, device=device, tiers=tiers)
        tables.streams = streams
        reasons["bag"] = tables.why
        return tables

    def _interaction(self, device: torch.device) -> Interaction:
        model = self.model
        if model.interaction != "dot":
            return make_interaction(model)
        body, self.settings.reasons["dot"] = dot.choose("auto" if self.switches.interaction else "reference", device)
        return Dot(model.vectors, diagonal=model.diagonal, body=body)

    def _arithmetic(self, device: torch.device, streams: SideStreams) -> Arithmetic:
        switches, reasons = self.switches, self.settings.reasons
        if not switches.mlp and switches.precision != "bfloat16":
            return Arithmetic()
        body, reasons["relu"] = mlp.choose("auto" if switches.mlp else "reference", device)
        last = body if switches.mlp and device.type == "cuda" else None
        copies = switches.mlp and switches.precision in ("tf32", "bfloat16")
        # The instructions that oneDNN uses for bfloat16 have no wider result in torch.
        rounded = device.type == "cpu" and self.settings.onednn
        return FastArithmetic(relu=body, last=last, low=switches.low, copies=copies, rounded=rounded, streams=streams)


def _onednn_of_bfloat16(requested: str) -> tuple[bool, str]:
    """Whether oneDNN computes the bfloat16 products of a CPU, and the reason."""
    instructions = bfloat16_instructions()
    if requested == "on" and instructions == "":
        fix = "--train.onednn auto, or --fast.precision float32"
        raise MachineError("oneDNN has no products of bfloat16 on this CPU, which has no instructions for it", fix=fix)
    if requested == "off":
        return False, "off: requested"
    if instructions or requested == "on":
        why = "requested" if requested == "on" else "the only fast products of bfloat16"
        return True, f"on: {why}; weight gradients are rounded once"
    lack = "has none" if instructions == "" else "may have none"
    return False, f"off: it warns of every bfloat16 product without instructions for it, and this CPU {lack}"


def check(config: DLRMWorkloadConfig) -> str:
    """Check the data without reading all of it, and the memory where a CPU will train; the line names the data."""
    if config.train.device == "cpu" or not Path("/dev/nvidia0").exists():
        require_room(config)
    if config.data.source == "random":
        return f"synthetic batches, {config.data.ids} ids"
    return describe(readable(config))


def readable(config: DLRMWorkloadConfig) -> ImportedClicks:
    """The imported clicks of a config, whose tables must fit them."""
    assert config.data.path is not None
    clicks = open_clicks(config.data.path, config.data.rows_split())
    require_tables(config.dlrm, clicks)
    return clicks


class PreparedDLRM(ConfiguredDLRM, PreparedRows):
    """Data opened, device and switches chosen; a trial allocates the tables."""

    def __init__(self, config: DLRMWorkloadConfig) -> None:
        super().__init__(config)
        self.source = self.rows()
        self.data, self.target = self.source.data, bounds(config)

    def order(self, seed: int) -> Order:
        """Batches on the device that trains: drawn there, or made on the host and copied."""
        device, batch_size = self.settings.device, self.config.train.batch_size
        if self.drawn and (device.type == "cpu" or self.switches.input == "device"):
            return self.bags(seed)
        if isinstance(self.source, StoredRows):
            order: Any = ClickOrder(store=self.source.clicks, batch_size=batch_size, seed=seed, split="fit")
        else:
            order = replace(self.bags(seed), device="cpu")
        return order if device.type == "cpu" else CopiedOrder(order, device, self.switches.input == "pinned")

    def trial(self, seed: int) -> DLRMTrial:
        return DLRMTrial(self, seed)

    def step_cost(self, batch: Any, ids: int, unique: int) -> dict[str, Cost]:
        samples, optimizer = len(batch), self.config.train.optimizer
        if optimizer == "adamw":
            return dlrm_step(self.model, samples, ids=ids, unique=unique)
        return sparse_dlrm_step(self.model, samples, ids=ids, unique=unique, optimizer=optimizer)

    def table_bytes(self) -> tuple[int, int]:
        row = FLOAT * self.model.dim
        return row, row * sum(self.model.rows)

    def fixes(self) -> tuple[Fix, ...]:
        """Every switch that is off, with its fast position on this device."""
        config, switches, on_cpu = self.config, self.switches, self.settings.device.type == "cpu"
        refused = ["onednn"] if switches.precision == "bfloat16" and bfloat16_instructions() == "" else []
        fixes = [fix for fix in cpu_fixes(config, self.settings) if fix.name not in refused]
        sparse, dots = config.train.optimizer != "adamw", config.model.interaction == "dot"
        capturable = config.train.micro_batches == 1 and sparse and self.tiers.placement == "device"
        of_gpu: dict[str, tuple[bool, str, float, str]] = {
            "input": (self.drawn and switches.input != "device", "batches drawn on the device", 2e-3, "device"),
            "pinned": (switches.input == "pageable", "batches copied from pinned memory", 1e-4, "pinned"),
            "graph": (not switches.graph and capturable, "the step as one CUDA graph", 1e-4, "on"),
            "precision": (switches.precision == "float32", "products in tf32", 5e-3, "tf32"),
            "bfloat16": (switches.precision != "bfloat16", "products in bfloat16", 2e-2, "bfloat16"),
        }
        titles = {
            "embedding": ("lookups and sparse updates in C", "one kernel for the lookups of all tables"),
            "interaction": ("the interaction in C", "one kernel per pass for the interaction"),
            "mlp": ("ReLU and bias gradient in one pass in C", "bias and ReLU inside the products"),
            "optimizer": ("one kernel for all dense parameters",) * 2,
        }
        possible = {"embedding": sparse or not on_cpu, "interaction": dots}
        fused = {
            name: (not getattr(switches, name) and possible.get(name, True), title[not on_cpu], 1e-4, "fused")
            for name, title in titles.items()
        }
        for name, (applies, title, tolerance, value) in {**({} if on_cpu else of_gpu), **fused}.items():
            if applies:
                fixes.append(self._fix(name, title, tolerance, **{FIELDS.get(name, name): value}))
        return tuple(fixes)

    def _fix(self, name: str, title: str, tolerance: float, **change: Any) -> Fix:
        implies: tuple[str, ...] = ()
        if name == "graph" and not self.switches.embedding:
            # The shapes of a graph cannot depend on the number of distinct rows of a batch.
            change["embedding"], implies = "fused", ("embedding",)
        return Fix(
            name=name,
            title=title,
            switch=" ".join(f"--fast.{field} {value}" for field, value in change.items()),
            config=replace(self.config, fast=replace(self.config.fast, **change)),
            tolerance=tolerance,
            implies=implies,
        )


FIELDS = {"pinned": "input", "bfloat16": "precision"}
"""Fixes that are a second position of another switch."""


class DLRMTrial(DLRMTrialState):
    """One model with its optimizer and the order of its batches, all by the switches."""

    model: DLRM
    prepared: PreparedDLRM

    def __init__(self, prepared: PreparedDLRM, seed: int) -> None:
        self.prepared, self.seed, self.ranks = prepared, seed, division(prepared, planned)
        config, switches, device = prepared.config, prepared.switches, prepared.settings.device
        streams = SideStreams(enabled=switches.graph and switches.mlp)
        self.model = prepared.make_model(
            seed,
            streams,
            self.ranks.bags(config.train.optimizer, eps=config.train.eps, parts=config.train.micro_batches),
        )
        self.optimizer = self._optimizer(streams)
        self.bags = prepared.bags(seed) if prepared.drawn else None
        order, whole = prepared.order(seed), None
        tables = self.model.embeddings
        if isinstance(tables, SparseTables) and tables.tiers is not None:
            order = PlacedOrder(order, tables, device)
        if switches.graph:
            order, whole = self._graph(order)
        recipe = Recipe(
            model=self.model,
            optimizer=self.optimizer,
            order=order,
            learning_rate=make_schedule(config.train, config.train.epochs * len(order)),
            epochs=config.train.epochs,
            max_steps=config.train.max_steps,
            micro_batches=config.train.micro_batches,
            whole_step=whole,
            validation_loss=self.validation_loss if prepared.source.choosing_rows else None,
            patience=config.train.patience,
        )
        self.recipe = self.ranks.clicks(recipe, self.model)

    def _optimizer(self, streams: SideStreams) -> Optimizer:
        train, switches = self.prepared.config.train, self.prepared.switches
        groups = [(self.model.dense_parameters(), train.weight_decay)]
        tables = self.model.embeddings
        if isinstance(tables, StackedTables):
            groups.append((list(tables.parameters()), train.table_weight_decay))
        dense = make_dense(train.optimizer, groups, eps=train.eps, plain=not switches.optimizer)
        if isinstance(tables, SparseTables):
            assert train.optimizer != "adamw"
            return SplitOptimizer(dense, SparseRows(tables, train.optimizer, eps=train.eps), streams=streams)
        return self.ranks.with_bags(dense)

    def _graph(self, order: Order) -> tuple[Order, GraphStep]:
        """The step as one graph, and the order that feeds it."""
        settings = self.prepared.settings
        requested_by = FAST_SWITCH if self.prepared.config.fast.graph == "on" else None

        def step(feed: Feed) -> GraphStep:
            return GraphStep(
                self.model,
                self.optimizer,
                feed,
                device=settings.device,
                reasons=settings.reasons,
                requested_by=requested_by,
                streams=self.model.arithmetic.streams,
            )

        if isinstance(order, RandomBags):
            return DrawnOrder(order), step(DrawnFeed(order, beside=self._beside()))
        assert isinstance(order, CopiedOrder)
        return order.order, step(CopiedFeed(self._room(), pinned=order.pinned))

    def _beside(self) -> SideStreams | None:
        """The streams on which the next batch may be drawn during a backward pass that does not read the batch: it uses
        copies of the dense features in bfloat16, sorted ids, and slopes that were computed with the loss."""
        model, switches = self.model, self.prepared.switches
        free = switches.precision == "bfloat16" and model.arithmetic.ends(model.top, model.criterion)
        return model.arithmetic.streams if free and model.arithmetic.streams.enabled else None

    def _room(self) -> ClickBatch:
        """Buffers on the device that hold any batch."""
        config, device = self.prepared.config, self.prepared.settings.device
        batch, keys = config.train.batch_size, self.prepared.model.features
        most = max_ids(config)
        values_V = torch.zeros(batch * sum(most), dtype=torch.int64, device=device)
        one = max(most) == 1
        offsets = torch.arange(len(keys) * batch + 1, device=device)
        return ClickBatch(
            torch.zeros(batch, self.prepared.model.dense, device=device),
            JaggedFeatures(keys, values_V, offsets, one, padded=not one),
            torch.zeros(batch, device=device),
        )

    def rows_of(self, batch: ClickBatch | DrawnBatch) -> Tensor:
        """The table rows a batch looks up."""
        if isinstance(batch, DrawnBatch):
            assert self.bags is not None
            batch = self.bags.batch(*divmod(batch.window, len(self.bags)))
        tables: Any = self.model.embeddings
        rows_V: Tensor = tables.rows_of(batch.features.to(self.prepared.settings.device))
        return rows_V
