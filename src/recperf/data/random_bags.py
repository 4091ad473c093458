"""Made-up samples with a table of its own size for every feature and bags of varying length.

An endless click task with a planted answer. A batch is a pure function of (seed, window), window = epoch * batches +
step, so that any batch is made without those before it; held-out batches are the windows before the start. How the
numbers come about is said in ops/draw/plan.py; on a GPU three kernels make a batch, and a CUDA graph can hold them.

Shapes: B samples, F sparse features, D dense features, V room for ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from ..config import require
from ..ops.draw import Buffers, Name, Plan, choose
from ..ops.draw.reference import planted_logits
from .batch import ClickBatch, JaggedFeatures
from .random_config import RandomBagsConfig, read_profile


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomBags:
    """Batches for `dlrm` that are drawn, not read."""

    keys: tuple[str, ...]
    """Names of the sparse features."""
    rows: tuple[int, ...]
    """Rows of each feature's table: its ids are 0 to this, exclusive."""
    dense: int
    """Dense features, uniform with mean 0 and variance 1."""
    batch_size: int
    seed: int
    """Decides the batches and the planted answer."""
    device: str = "cpu"
    """Where batches are made and stay."""
    config: RandomBagsConfig
    implementation: Name = "auto"
    """What draws: reference (torch), native (C, a CPU), triton (a GPU), or auto."""

    def __post_init__(self) -> None:
        require(len(self.keys) >= 1, "keys", self.keys, "at least one name")
        require(len(set(self.keys)) == len(self.keys), "keys", self.keys, "names that differ")
        require(len(self.rows) == len(self.keys), "rows", self.rows, f"one number for each of {len(self.keys)} keys")
        for name in ("dense", "batch_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        # Built here: a table or a profile that does not fit is refused before anything is drawn.
        _ = self.plan

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.config.batches

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        """The batches of an epoch from the given one on."""
        return (self.batch(epoch, step) for step in range(start, len(self)))

    def batch(self, epoch: int, step: int) -> ClickBatch:
        if epoch < 0 or not 0 <= step < len(self):
            raise IndexError(f"no batch {step} in epoch {epoch}; an epoch has {len(self)}")
        return self._window(epoch * len(self) + step)

    def held_out(self, count_batches: int) -> Iterator[ClickBatch]:
        """Batches of the same task that training never sees; the same ones whenever asked."""
        return (self._window(-1 - index) for index in range(count_batches))

    def planted_logits(self, dense_BD: Tensor, features: JaggedFeatures) -> Tensor:
        """The log odds labels are drawn from: what a perfect model would answer."""
        features = features.trimmed()
        return planted_logits(self.plan, dense_BD, features.values_V, features.offsets_FB1)

    def buffers(self) -> ClickBatch:
        """Room for any batch, for `draw` to fill again and again."""
        plan = self.plan
        features = JaggedFeatures(
            self.keys,
            torch.empty(plan.capacity, dtype=torch.int64, device=self.device),
            torch.empty(plan.features * plan.samples + 1, dtype=torch.int64, device=self.device),
            one_id_a_bag=max(plan.most) == 1,
            padded=not plan.exact,
        )
        dense_BD = torch.empty(plan.samples, plan.dense, device=self.device)
        return ClickBatch(dense_BD, features, torch.empty(plan.samples, device=self.device))

    def draw(self, index_1: Tensor, batch: ClickBatch) -> None:
        """Fill the buffers for the window whose number a one-element int64 tensor on their device holds.

        Nothing waits for the device and no shape depends on what is drawn, so that a CUDA graph can hold it. Ids beyond
        the last offset are unspecified.
        """
        features = batch.features
        buffers = Buffers(features.offsets_FB1, features.values_V, batch.dense_BD, batch.labels_B)
        self._choice[0].draw(self.plan, index_1, buffers)

    @property
    def why(self) -> str:
        """Which implementation draws, and why."""
        return self._choice[1]

    @cached_property
    def plan(self) -> Plan:
        config = self.config
        return Plan(
            samples=self.batch_size,
            dense=self.dense,
            kind=config.ids,
            rows=self.rows,
            most=config.most_ids(self.rows),
            fixed=config.fixed,
            distinct=config.distinct,
            seed=self.seed,
            device=self.device,
            exponent=config.exponent,
            mean=config.mean,
            deviation=config.deviation,
            counts=self._counts(),
        )

    def _counts(self) -> tuple[Mapping[int, int], ...]:
        if self.config.profile is None:
            return ()
        return tuple(read_profile(self.config.profile, dict(zip(self.keys, self.rows))).values())

    @cached_property
    def _choice(self) -> tuple[ModuleType, str]:
        return choose(self.implementation, self.device)

    def _window(self, index: int) -> ClickBatch:
        """A batch of its own, with no room to spare: on a GPU the host has to ask how many ids there are."""
        room = self.buffers()
        self.draw(torch.tensor([index], device=self.device), room)
        return ClickBatch(room.dense_BD, room.features.trimmed(), room.labels_B)
