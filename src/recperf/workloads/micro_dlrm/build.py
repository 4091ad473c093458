"""Building a click-prediction workload on MovieLens: the part of it that needs torch."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...data.batch import ClickBatch
from ...data.clicks import ClickArrays, build
from ...data.config import MovieLensConfig
from ...data.movielens import load
from ...data.order import Samples, ShuffledOrder, cut
from ...distributed.world import current
from ...execution.workload import Fix, Trial
from ...measure.cost import FLOAT, Cost
from ...models.config import DLRMConfig
from ...models.cost import dlrm_step
from ...models.dlrm import DLRM
from ...models.embeddings import StackedTables
from ...models.tables import HashedTable, SparseTables
from ...train.baselines import baselines
from ...train.config import TrainConfig
from ...train.device import Settings, choose
from ...train.loop import Optimizer, Order, Position, Recipe
from ...train.metrics import binary_metrics
from ...train.optim import AdamW, one_cycle
from .config import MicroDLRMConfig, bounds, check_sizes

SCORING_BATCH = 8192


class PreparedClicks:
    """MovieLens read, split and turned into tensors on the device that trains."""

    def __init__(self, config: MicroDLRMConfig) -> None:
        self.config = config
        self.train, self.valid, self.data = movielens_samples(config.data, config.model)
        self.settings = choose(
            config.train, largest_product_flops=largest_product(config.model, config.train.batch_size)
        )
        self.target = bounds(config, self.data)

    def baselines(self) -> dict[str, dict[str, float]]:
        return baselines(self.train, self.valid)

    def trial(self, seed: int) -> ClickTrial:
        device, world = self.settings.device, current()
        train, valid = self.train.to(device), self.valid.to(device)
        if world.size > 1:
            from ..click_ranks import RankMicroDLRM

            return RankMicroDLRM(self.config, train, valid, seed, self.settings, world)
        return ClickTrial(self.config, train, valid, seed, device)

    def step_cost(self, ids: int, unique: int) -> dict[str, Cost]:
        """Of a step; of several ranks, of this one's share of it."""
        return dlrm_step(self.config.model, rank_share(self.config.train.batch_size), unique=unique)

    def table_bytes(self) -> tuple[int, int]:
        row = FLOAT * self.config.model.dim
        return row, row * sum(self.config.model.rows)

    def fixes(self) -> tuple[Fix, ...]:
        return cpu_fixes(self.config, self.settings)

    def pair(self, trial: Trial) -> dict[str, Recipe] | None:
        return None


def cpu_fixes(config: Any, settings: Settings) -> tuple[Fix, ...]:
    """What any click workload on a CPU can switch back: threads and oneDNN that were set by hand."""
    if settings.device.type != "cpu":
        return ()
    found = []
    cores = os.cpu_count() or 1
    # Only what the user set: auto has its reasons, which the run records.
    if 0 < config.train.threads < cores:
        changed = replace(config, train=replace(config.train, threads=cores))
        title = f"{cores} threads inside an operator in place of {settings.threads}"
        found.append(
            Fix(name="threads", title=title, switch=f"--train.threads {cores}", config=changed, tolerance=1e-4)
        )
    if config.train.onednn == "off":
        changed = replace(config, train=replace(config.train, onednn="on"))
        title = "matrix products by oneDNN"
        found.append(Fix(name="onednn", title=title, switch="--train.onednn on", config=changed, tolerance=1e-4))
    return tuple(found)


class KeptTrial:
    """What of a trial goes through a checkpoint."""

    model: DLRM
    optimizer: Optimizer

    def tables(self) -> list[tuple[str, int]]:
        """Name and rows of each table."""
        tables = self.model.embeddings
        if isinstance(tables, HashedTable):
            return [("shared", tables.rows)]
        assert isinstance(tables, StackedTables | SparseTables)
        return list(zip(tables.keys, tables.rows))

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def one_cycle_recipe(model: DLRM, optimizer: Optimizer, order: Order, settings: TrainConfig) -> Recipe:
    """A training whose learning rate goes up and down once over all planned epochs."""
    planned = settings.epochs * len(order)
    return Recipe(
        model=model,
        optimizer=optimizer,
        order=order,
        learning_rate=lambda step: one_cycle(step, planned, peak=settings.learning_rate, rise=settings.rise),
        epochs=settings.epochs,
        max_steps=settings.max_steps,
    )


class ClickTrial(KeptTrial):
    """One DLRM, its optimizer and the order of its batches."""

    def __init__(
        self, config: MicroDLRMConfig, train: Samples, valid: Samples, seed: int, device: torch.device
    ) -> None:
        settings = config.train
        self.model = DLRM(config.model, seed=seed).to(device)
        tables = list(self.model.embeddings.parameters())
        self.optimizer = AdamW(
            [(self.model.dense_parameters(), settings.weight_decay), (tables, settings.table_weight_decay)]
        )
        self.valid = valid
        order = ShuffledOrder(samples=train, batch_size=settings.batch_size, seed=seed)
        self.recipe = one_cycle_recipe(self.model, self.optimizer, order, settings)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Of the validation rows, in their order."""
        self.model.eval()
        return torch.cat([self.model(b.dense_BD, b.features) for b in cut(self.valid, SCORING_BATCH)])

    def score(self, at: Position | None = None) -> dict[str, float]:
        return binary_metrics(self.logits(), self.valid.labels_N)

    def rows_of(self, batch: ClickBatch) -> Tensor:
        """The table rows a batch looks up."""
        assert isinstance(self.model.embeddings, StackedTables)
        return self.model.embeddings.rows_of(batch.features)


def rank_share(samples: int) -> int:
    """Samples of a batch that this process works on: all, or with several ranks its part."""
    world = current()
    return max(1, len(range(world.rank, samples, world.size)))


def largest_product(model: DLRMConfig, batch: int) -> int:
    """FLOPs of the largest matrix product of a step."""
    stacks = [model.bottom, model.top_widths]
    if model.interaction == "dcn":
        stacks.append((model.interaction_width, model.cross_rank))
    return max(2 * batch * before * after for widths in stacks for before, after in zip(widths, widths[1:]))


def movielens_samples(
    config: MovieLensConfig, model: DLRMConfig | None = None
) -> tuple[Samples, Samples, dict[str, Any]]:
    """Training and validation rows, and what a result says of them."""
    raw = load(config)
    clicks = build(raw, config)
    if model is not None:
        check_sizes(model, clicks.rows, len(clicks.dense_names))
    train, valid = _samples(clicks.train), _samples(clicks.valid)
    described = {
        "name": raw.name,
        "digest": raw.digest,
        "rows": len(raw.rating),
        "train_rows": len(train),
        "valid_rows": len(valid),
        "split": config.split,
        "synthetic": raw.synthetic,
    }
    return train, valid, described


def _samples(arrays: ClickArrays) -> Samples:
    return Samples(
        keys=("user", "item", "occupation"),
        dense_ND=torch.from_numpy(arrays.dense),
        ids_FN=torch.from_numpy(arrays.ids).t().contiguous().t(),
        labels_N=torch.from_numpy(arrays.labels),
    )
