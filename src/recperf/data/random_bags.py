"""Synthetic samples: dense features, bags of ids and labels drawn from a planted model.

The task never ends. A batch is a pure function of (seed, index) with index = epoch * batches + step, so any batch is
made without those before it; held-out batches have the indices before 0. ops/draw defines the random numbers; on a GPU
three kernels make a batch, and a CUDA graph can capture them.

Shapes: B samples, F sparse features, D dense features, V slots for ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from ..config import require
from ..ops.choice import Name
from ..ops.draw import Buffers, DrawPlan, choose, reference, shared_space
from ..ops.draw.shared_space import SharedSpacePlan
from .batch import ClickBatch, JaggedFeatures
from .config import RandomBagsConfig
from .order import WHOLE, RankShare


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomBags:
    """Batches that are drawn, not read: from a table per feature, or from one id space that all features share."""

    keys: tuple[str, ...]
    """Names of the sparse features."""
    rows: tuple[int, ...] = ()
    """Rows of each feature's table: its ids are 0 to this, exclusive."""
    id_space: int | None = None
    """In place of rows: the size, up to 2^40, of one id space for all features. Bags then have their maximum length."""
    dense: int
    """Dense features, uniform with mean 0 and variance 1."""
    batch_size: int
    seed: int
    """Determines the batches and the planted model."""
    device: str = "cpu"
    """Where batches are made and stay."""
    config: RandomBagsConfig
    implementation: Name = "auto"
    """What draws: reference (torch), native (C, CPU), triton (GPU), or auto."""
    rank_share: RankShare = WHOLE
    """The samples of each batch that are drawn; the others cost nothing."""

    def __post_init__(self) -> None:
        require(len(self.keys) >= 1, "keys", self.keys, "at least one name")
        require(len(set(self.keys)) == len(self.keys), "keys", self.keys, "distinct names")
        tables = 0 if self.id_space is not None else len(self.keys)
        require(len(self.rows) == tables, "rows", self.rows, f"{tables} numbers: one per key, none with an id_space")
        for name in ("dense", "batch_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(
            self.id_space is None or self.rank_share == WHOLE,
            "rank_share",
            self.rank_share,
            "all samples, with an id_space",
        )
        # Built here, so that a table that does not fit is rejected before anything is drawn.
        _ = self.plan

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.config.batches

    def share(self, rank_share: RankShare) -> RandomBags:
        """The same batches, of which only this share is drawn."""
        return replace(self, rank_share=rank_share)

    def whole_samples(self, number: int) -> int:
        """Samples of a batch, those of all ranks together."""
        return self.batch_size

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        """Yield the batches of an epoch, beginning with `start`."""
        return (self.batch(epoch, step) for step in range(start, len(self)))

    def batch(self, epoch: int, step: int) -> ClickBatch:
        if epoch < 0 or not 0 <= step < len(self):
            raise IndexError(f"no batch {step} in epoch {epoch}; an epoch has {len(self)}")
        return self._batch_at(epoch * len(self) + step)

    def held_out(self, count_batches: int) -> Iterator[ClickBatch]:
        """Yield batches of the same task that training never sees; every call yields the same ones."""
        return (self._batch_at(-1 - index) for index in range(count_batches))

    def planted_logits(self, batch: ClickBatch) -> Tensor:
        """The log odds that labels are drawn from: what a perfect model would predict."""
        features = batch.features.trimmed()
        if isinstance(self.plan, SharedSpacePlan):
            return shared_space.planted_logits(self.plan, batch.dense_BD, features.values_V)
        return reference.planted_logits(self.plan, batch.dense_BD, features.values_V, features.offsets_FB1)

    def buffers(self) -> ClickBatch:
        """Allocate a batch that `draw` can fill repeatedly."""
        plan, features = self.plan, len(self.keys)
        bags = JaggedFeatures(
            self.keys,
            torch.empty(plan.capacity, dtype=torch.int64, device=self.device),
            torch.empty(features * plan.samples + 1, dtype=torch.int64, device=self.device),
            one_id_a_bag=max(plan.max_ids) == 1,
            padded=not plan.exact,
        )
        dense_BD = torch.empty(plan.samples, plan.dense, device=self.device)
        return ClickBatch(dense_BD, bags, torch.empty(plan.samples, device=self.device))

    def draw(self, index_1: Tensor, batch: ClickBatch) -> None:
        """Fill the buffers with the batch whose index a one-element int64 tensor on their device holds.

        Nothing waits for the device and no shape depends on what is drawn, so a CUDA graph can capture it. Ids beyond
        the last offset are unspecified.
        """
        out = Buffers(batch.dense_BD, batch.features.values_V, batch.features.offsets_FB1, batch.labels_B)
        if isinstance(self.plan, SharedSpacePlan):
            shared_space.draw(self.plan, index_1, out)
        else:
            self._choice[0].draw(self.plan, index_1, out)

    @property
    def why(self) -> str:
        """The implementation that draws, and the reason."""
        if isinstance(self.plan, SharedSpacePlan):
            return "reference: the features share an id space"
        return self._choice[1]

    @cached_property
    def plan(self) -> DrawPlan | SharedSpacePlan:
        config = self.config
        if self.id_space is not None:
            return SharedSpacePlan(
                samples=self.batch_size,
                dense=self.dense,
                features=len(self.keys),
                kind=config.ids,
                id_space=self.id_space,
                ids_per_bag=config.ids_per_bag,
                seed=self.seed,
                device=self.device,
                exponent=config.exponent,
            )
        samples = self.rank_share.made(self.batch_size)
        return DrawPlan(
            samples=len(samples),
            whole=self.batch_size,
            begin=samples.start,
            step=samples.step,
            dense=self.dense,
            kind=config.ids,
            rows=self.rows,
            max_ids=config.max_ids(self.rows),
            fixed=config.fixed,
            distinct=config.distinct,
            seed=self.seed,
            device=self.device,
            exponent=config.exponent,
            mean=config.mean,
            deviation=config.deviation,
        )

    @cached_property
    def _choice(self) -> tuple[ModuleType, str]:
        return choose(self.implementation, self.device, self.config.ids)

    def _batch_at(self, index: int) -> ClickBatch:
        """A new batch without unused slots: on a GPU the host has to read the number of ids."""
        batch = self.buffers()
        self.draw(torch.tensor([index], device=self.device), batch)
        return ClickBatch(batch.dense_BD, batch.features.trimmed(), batch.labels_B)
