"""A trial of dlrm-v4 on several ranks: the same model and order, each rank with its share of every batch.

A batch is `train.batch_size` samples of all ranks together. They are dealt by counted work, the square of their lengths
included, or in turn. A rank that gets none takes the first sample with weight 0, because every rank must ask for rows
in every step.

Shapes: B samples of a batch, T tokens of a rank's samples, R ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.batch import HistoryBatch
from ...data.yambda.history import Histories
from ...data.yambda.loader import StreamOrder
from ...distributed.balance import deal, stride
from ...distributed.exchange import made_event
from ...distributed.placement import plan_text
from ...distributed.rank_tables import agreed
from ...distributed.ranks import Ranks, current
from ...distributed.shares import SharedBatch, announced
from ...distributed.step import RankStep, shared_step
from ...distributed.tables import TorchRecTables
from ...models.dlrm_v4.config import DLRMv4Config
from ...models.dlrm_v4.inputs import Inputs
from ...models.dlrm_v4.model import DLRMv4
from ...models.dlrm_v4.tables import DLRMv4Tables
from ...models.tiers.cache import TieredRows
from ...plan.memory import rank_demand
from ...stop import reached
from ...train.feeds import prefetched
from .build import HistoryTrial, PreparedHistories
from .plan import planned, sample_work
from .steps import InputOrder, Numbered

TABLES = "tables."
"""What the names of tables begin with in a state."""


class PreparedHistoriesOnRanks(PreparedHistories):
    def trial(self, seed: int) -> HistoryTrial:
        return RankTrial(self, seed, current())


@dataclass(frozen=True, eq=False)
class DealtBatch(HistoryBatch):
    """A rank's samples of a batch, and what it knows about the whole batch."""

    parts: list[NDArray[np.int64]] = field(kw_only=True)
    """The positions of each rank's samples in the whole batch."""
    whole_longest: int = field(kw_only=True)
    """Tokens of its longest row."""
    before_B: Tensor = field(kw_only=True)
    """Tokens of the whole batch before each sample of this rank."""

    @property
    def samples(self) -> int:
        """Of all ranks."""
        return sum(map(len, self.parts))


@dataclass(frozen=True, eq=False)
class Share:
    """Gathers this rank's samples of a batch. Lengths of samples are known without gathering them, so that every rank
    knows what the others take.

    Every rank counts and deals the whole batch, in the threads that prepare batches. With histories of 2,600 events
    counting takes 0.2 us a sample where a user's samples follow one another (1.9 us where they are shuffled) and
    dealing 0.75 us; gathering a sample takes 16 us. So a batch of 8,192 takes such a thread 8 ms on any number of
    ranks, as long as gathering the samples of one of 16 ranks, and about a seventh of a step of 64 H200.
    """

    histories: Histories
    model: DLRMv4Config
    rank: int
    size: int
    balance: bool

    def batch(self, positions_B: NDArray[np.int64]) -> DealtBatch:
        tokens_B = self.histories.lengths(positions_B) + self.model.context_tokens + 1
        parts = self.parts(tokens_B)
        own = parts[self.rank] if len(parts[self.rank]) else np.zeros(1, np.int64)
        batch = self.histories.batch(positions_B[own])
        before_B = torch.from_numpy((np.cumsum(tokens_B) - tokens_B)[own])
        return DealtBatch(**vars(batch), parts=parts, whole_longest=int(tokens_B.max()), before_B=before_B)

    def parts(self, tokens_B: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The samples of each rank."""
        if not self.balance:
            return stride(len(tokens_B), self.size)
        return deal(self.work(tokens_B.astype(np.float64)), self.size)

    @cached_property
    def work(self) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        return sample_work(self.model)


@dataclass(frozen=True, eq=False)
class SharedOrder(InputOrder):
    """The batches of a stream, as one rank sees them."""

    world: Ranks
    ahead: bool = False
    """Whether a batch brings the one after it."""
    last: int = 0
    """The number of steps that training ends with, if not with the data: what comes after is not looked at then."""

    def inputs(self, batch: HistoryBatch) -> Inputs:
        inputs = super().inputs(batch)
        if not isinstance(batch, DealtBatch):
            return inputs
        numbers_T = None
        if self.model.input_dropout or self.model.hstu.dropout:
            starts_B = inputs.offsets_B1[:-1]
            shift_B = batch.before_B.to(starts_B.device) - starts_B
            shift_T = shift_B.repeat_interleave(inputs.offsets_B1.diff(), output_size=inputs.tokens)
            numbers_T = torch.arange(inputs.tokens, device=shift_T.device) + shift_T
        return replace(inputs, whole_longest=batch.whole_longest, numbers_T=numbers_T)

    def parts(self, batch: HistoryBatch) -> list[NDArray[np.int64]]:
        assert isinstance(batch, DealtBatch)
        return batch.parts

    def batches(self, epoch: int, start: int = 0) -> Iterator[SharedBatch[Numbered]]:  # type: ignore[override]
        with closing(self.loader(start)) as loader:
            numbers = itertools.count(epoch * len(self) + start)
            gathered = prefetched(loader, lambda batch: self.shared(batch, next(numbers)), self.device)
            for batch in announced(gathered, ahead=self.ahead, last=self.last):
                if batch.step - epoch * len(self) in self.firsts:
                    reached("window: entered")
                yield batch

    def shared(self, batch: HistoryBatch, step: int) -> SharedBatch[Numbered]:
        assert isinstance(batch, DealtBatch)
        own = len(batch.parts[self.world.rank])
        part = Numbered(self.inputs(batch), step, counted=own > 0)
        return SharedBatch(part, step, batch.samples, own, made_event(self.device))


class RankTrial(HistoryTrial):
    """One rank of a trial: dense parameters as all ranks have them, and its own part of the tables."""

    def __init__(self, prepared: PreparedHistories, seed: int, world: Ranks) -> None:
        self.world = world
        super().__init__(prepared, seed)

    @property
    def rank_tables(self) -> TorchRecTables:
        return cast(TorchRecTables, self.model.tables)

    def _model(self, seed: int) -> DLRMv4:
        config, device = self.prepared.config, self.prepared.settings.device
        demand = rank_demand(planned(config), self.world.size, config.distributed, on_cpu=self.world.device == "cpu")
        tables = TorchRecTables(
            demand, config.distributed, self.world, seed=seed, device=device,
            tiers=agreed(self.world, self.prepared.tiers),
        )  # fmt: skip
        return DLRMv4(config.model, seed=seed, device=device, tables=cast(DLRMv4Tables, tables))

    def _whole_step(self, inputs: InputOrder) -> RankStep:
        config, dense = self.prepared.config, self.model.dense_parameters()
        ratio = config.train.table_learning_rate / config.train.learning_rate
        return shared_step(
            self.stepped, self.optimizer, self.model, dense, self.rank_tables, config.distributed,
            self.prepared.settings, table_rate=ratio,
        )  # fmt: skip

    def inputs(self, order: StreamOrder) -> InputOrder:
        prepared, config = self.prepared, self.prepared.config
        share = Share(
            prepared.histories, config.model, self.world.rank, self.world.size, config.distributed.balance
        )  # fmt: skip
        return SharedOrder(
            order, cast(Histories, share), config.model, prepared.settings.device, config.data.workers, self.world,
            ahead=config.distributed.pipeline, last=config.train.max_steps,
        )  # fmt: skip

    def tiers(self) -> TieredRows | None:
        return self.rank_tables.tiers

    def plan(self) -> str:
        """Which rank holds what, as a table to read."""
        return plan_text(self.rank_tables.parts)

    def state(self) -> dict[str, Any]:
        """This rank's parts of the tables, and the rest as all ranks have it: what one process saves, in parts."""
        tables = self.rank_tables.sharded_state()
        recent = self.world.merge_tally(self.stepped.recent)
        dense = {name: value.detach() for name, value in self.model.state_dict().items()}
        tallies = {name: tally.state() for name, tally in {**self._tallies(), "recent": recent}.items()}
        # In which order numbers are added up shows in their last bit, so ranks keep what each of them has.
        sums_R2 = torch.zeros(self.world.size, 2, dtype=torch.float64)
        sums_R2[self.world.rank] = self.stepped.recent.sums_2
        tallies["recent"]["sums of ranks"] = self.world.sum_(sums_R2)
        return {
            "model": {**{f"{TABLES}{name}": tensor for name, tensor in tables.items()}, **dense},
            "optimizer": self.optimizer.state_dict(),
            "tallies": tallies,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The tables' parts were read to where they lie."""
        self.rank_tables.forget()
        dense = {name: tensor for name, tensor in state["model"].items() if not name.startswith(TABLES)}
        self.model.load_state_dict(dense)
        self.optimizer.load_state_dict(state["optimizer"])
        for name, tally in self._tallies().items():
            tally.load(state["tallies"][name])
        if not self.world.is_leader:
            # Rank 0 has what all counted.
            self.stepped.recent.clear()
        sums_R2 = state["tallies"]["recent"].get("sums of ranks")
        if sums_R2 is not None and len(sums_R2) == self.world.size:
            self.stepped.recent.sums_2.copy_(sums_R2[self.world.rank])
