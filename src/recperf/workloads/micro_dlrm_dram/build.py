"""A trial of micro-dlrm-dram: the hashed table, the model, its optimizers and its batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...data.batch import ClickBatch
from ...data.config import RandomBagsConfig
from ...data.order import ShuffledOrder
from ...data.random_bags import RandomBags
from ...execution.tables import placed_tables
from ...execution.workload import Arm, Trial
from ...measure.cost import FLOAT, Cost
from ...measure.fixes import Fix
from ...models.config import hashed_dlrm_step
from ...models.dlrm import DLRM
from ...models.tables import SHARED, HashedTable
from ...models.tiers.opening import open_tiers
from ...train.device import Settings, choose, cpu_fixes
from ...train.feeds import PlacedOrder
from ...train.loop import Order
from ...train.optim import AdamW, SparseRows, SplitOptimizer
from ..clicks import DLRMTrialState, DrawnRows, PreparedRows, StoredRows, largest_product, one_cycle_recipe
from ..micro_dlrm.config import ratings
from .config import MicroDLRMDramConfig, bounds, check, estimate, hot_ids, ids_a_batch, resolved_rows, table_state


class PreparedDram(PreparedRows):
    """Data and settings; a trial allocates the table."""

    def __init__(self, config: MicroDLRMDramConfig) -> None:
        check(config)
        self.config = config
        self.rows = resolved_rows(config)
        self.model = config.model.dlrm(self.rows)
        self.settings: Settings = choose(
            config.train, largest_product_flops=largest_product(self.model, config.train.batch_size)
        )
        self.tiers = placed_tables(config.tables, estimate(config), self.settings.device)
        self.settings.reasons["tables"] = self.tiers.why
        if config.data.ids == "movielens":
            self.source = StoredRows(ratings(config.data), self.settings.device)
        else:
            self.source = DrawnRows(self.bags, f"virtual {config.data.ids} ids", config)
        self.data, self.target = self.source.data, bounds(config)

    def order(self, seed: int, *, id_space: int | None = None) -> Order:
        """The batches of a training; with an id space, virtual ids are uniform in that space instead."""
        if isinstance(self.source, StoredRows):
            train = self.source.samples("train").to(self.settings.device)
            return ShuffledOrder(samples=train, batch_size=self.config.train.batch_size, seed=seed)
        return self.bags(seed, id_space=id_space)

    def bags(self, seed: int, *, id_space: int | None = None) -> RandomBags:
        data, model = self.config.data, self.config.model
        return RandomBags(
            keys=model.features,
            id_space=id_space or data.id_space,
            dense=model.bottom[0],
            batch_size=self.config.train.batch_size,
            seed=seed,
            device=self.settings.device.type,
            config=RandomBagsConfig(
                ids="zipf" if data.ids == "zipf" and id_space is None else "uniform",
                ids_per_bag=data.ids_per_bag,
                exponent=data.exponent,
                batches=data.batches,
            ),
        )

    def trial(self, seed: int) -> DramTrial:
        return DramTrial(self, seed)

    def step_cost(self, batch: Any, ids: int, unique: int) -> dict[str, Cost]:
        optimizer = self.config.train.table_optimizer
        return hashed_dlrm_step(self.model, len(batch), ids=ids, unique=unique, optimizer=optimizer)

    def table_bytes(self) -> tuple[int, int]:
        row = FLOAT * self.config.model.dim
        return row, row * self.rows

    def fixes(self) -> tuple[Fix, ...]:
        config, fixes = self.config, list(cpu_fixes(self.config, self.settings))
        if config.model.bag == "reference":
            changed = replace(config, model=replace(config.model, bag="auto"))
            title = "lookups with prefetching and sparse updates in C"
            fixes.append(Fix(name="embedding", title=title, switch="--model.bag auto", config=changed, tolerance=1e-4))
        return tuple(fixes)

    def pair(self, trial: Trial, hot_bytes: int | None) -> dict[str, Arm] | None:
        """The same model and shapes, ids from a few or from the whole virtual space. With rows in host memory or files
        the two would compare those with the cache, not memory with a processor's caches."""
        data, hot = self.config.data, hot_ids(self.config, hot_bytes)
        if not isinstance(self.source, DrawnRows) or data.id_space <= hot or self.tiers.placement != "device":
            return None
        assert isinstance(trial, DramTrial)

        def arm(id_space: int | None) -> Arm:
            recipe = replace(trial.recipe, order=self.order(self.config.seed, id_space=id_space))
            if id_space is None and data.ids != "uniform":
                return Arm(recipe, None, None)
            rows = self._reached(id_space or data.id_space)
            return Arm(recipe, rows, trial.random_lookups(rows))

        return {"cold": arm(None), "hot": arm(hot)}

    def _reached(self, ids: int) -> int:
        """How many rows `ids` ids of each feature are expected to hash to."""
        return round(-self.rows * math.expm1(-ids * len(self.config.model.features) / self.rows))


class DramTrial(DLRMTrialState):
    """One DLRM over a hashed table, its two optimizers and its batches."""

    prepared: PreparedDram

    def __init__(self, prepared: PreparedDram, seed: int) -> None:
        config, settings = prepared.config, prepared.config.train
        model, device = config.model, prepared.settings.device
        self.prepared, self.seed = prepared, seed
        tiers = None
        if prepared.tiers.placement != "device":
            tables, state = {SHARED: prepared.rows}, table_state(config)
            tiers = open_tiers(tables, prepared.tiers, dim=model.dim, state=state, device=device)
        self.table = HashedTable(
            model.features,
            prepared.rows,
            model.dim,
            bag=model.bag,
            device=device,
            tiers=tiers,
        )
        self.model = DLRM(prepared.model, seed=seed, embeddings=self.table).to(device)
        prepared.settings.reasons["bag"] = self.table.why
        prepared.settings.reasons["huge_pages"] = self.table.huge
        sparse = SparseRows(self.table, settings.table_optimizer, decay=settings.table_weight_decay)
        dense = AdamW([(self.model.dense_parameters(), settings.weight_decay)])
        ratio = settings.table_learning_rate / settings.learning_rate
        self.optimizer = SplitOptimizer(dense, sparse, table_ratio=ratio, clip=settings.clip)
        order = prepared.order(seed)
        if tiers is not None:
            order = PlacedOrder(order, self.table, device)
        self.recipe = one_cycle_recipe(self.model, self.optimizer, order, settings)

    def rows_of(self, batch: ClickBatch) -> Tensor:
        """The table rows a batch looks up."""
        return self.table.rows_of(batch.features)

    def random_lookups(self, rows: int) -> Callable[[], Callable[[], object]]:
        """Draws the rows of a step's lookups from `rows` rows of the table. Few rows lie anywhere in it, as those that
        ids hash to: at equal distances they would compete for the same places of a cache."""
        config, table, count = self.prepared.config, self.table, self.prepared.rows
        lookups, generator = ids_a_batch(config), torch.Generator().manual_seed(self.seed)
        device = table.table_RD.device
        places = torch.randint(count, (rows,), generator=generator) if 2 * rows <= count else None
        offsets_B1 = torch.arange(0, lookups + 1, config.data.ids_per_bag, device=device)

        def draw() -> Callable[[], object]:
            rows_V = torch.randint(rows, (lookups,), generator=generator)
            rows_V = (rows_V if places is None else places[rows_V]).to(device)
            return lambda: table.bag.bag_sum(table.table_RD, rows_V, offsets_B1)

        return draw
