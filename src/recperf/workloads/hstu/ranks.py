"""A trial of hstu on several ranks: each has all weights, and its share of the sequences of every batch.

A batch is `train.batch_size` sequences of all ranks together. A rank that gets none takes the first one with weight 0,
because every rank must take part in every step.

Shapes: B sequences of a rank, W of the whole batch, T positions of a rank, N targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...data.next_item import Targets
from ...data.next_item_batches import SequenceBatch, SequenceOrder, WindowBatch
from ...distributed.balance import deal, stride
from ...distributed.ranks import Ranks, current
from ...distributed.shares import SharedBatch
from ...distributed.step import shared_step
from ...errors import UsageError
from ...train.next_item import Ranked
from .build import PreparedSequences, SequenceTrial
from .config import HSTUConfig


class PreparedSequencesOnRanks(PreparedSequences):
    def __init__(self, config: HSTUConfig) -> None:
        if config.used_rows:
            what = "ranks of hstu update all items: adam and tables outside the device need a single process"
            raise UsageError(what, fix="--ranks 1, or --train.table-optimizer adamw --tables.placement device")
        super().__init__(config)

    def trial(self, seed: int) -> SequenceTrial:
        return RankTrial(self, seed)


@dataclass(frozen=True, eq=False)
class SharedOrder:
    """The batches of an order, as one rank sees them."""

    order: SequenceOrder
    world: Ranks
    balance: bool

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int = 0) -> Iterator[SharedBatch[SequenceBatch]]:
        for step, window in enumerate(self.order.windows(epoch, start), epoch * len(self) + start):
            yield self.shared(window, step)

    def shared(self, window: WindowBatch, step: int) -> SharedBatch[SequenceBatch]:
        """The loss of a rank is a sum over its positions, such that those of all ranks add up to the mean."""
        lengths_W, size = window.lengths_B, self.world.size
        parts = deal(lengths_W.double().numpy(), size) if self.balance else stride(len(window), size)
        own = parts[self.world.rank]
        taken_B = torch.from_numpy(own if len(own) else np.zeros(1, np.int64))
        part = WindowBatch(window.events, window.begins_B[taken_B], lengths_W[taken_B]).gathered()
        before_B, whole = (lengths_W.cumsum(0) - lengths_W)[taken_B], int(lengths_W.sum())
        before_T = before_B.repeat_interleave(lengths_W[taken_B]).to(part.positions_T.device)
        weight = len(window) / (max(1, len(own)) * whole)
        part = replace(
            part,
            weights_T=torch.full(before_T.shape, weight, device=before_T.device),
            numbers_T=before_T + part.positions_T,
            whole=whole,
        )
        return SharedBatch(part, step, len(window), len(own))


class RankTrial(SequenceTrial):
    def __init__(self, prepared: PreparedSequences, seed: int) -> None:
        super().__init__(prepared, seed)
        self.world, options = current(), prepared.config.distributed
        step = shared_step(
            self.model, self.optimizer, self.model, self.model.parameters(), None, options, prepared.settings
        )
        assert isinstance(self.recipe.order, SequenceOrder)
        order = SharedOrder(self.recipe.order, self.world, options.balance)
        self.recipe = replace(self.recipe, order=order, whole_step=step)

    def ranked(self, targets: Targets) -> Ranked:
        """Each rank ranks its share of the targets."""
        parts = stride(len(targets), self.world.size)
        own = parts[self.world.rank]
        ranked = super().ranked(Targets(targets.users_N[own], targets.positions_N[own]))
        gathered = self.world.all_gather((ranked.ranks_N, ranked.lists_NK))
        order_N = torch.from_numpy(np.argsort(np.concatenate(parts)))
        ranks_N, lists_NK = (torch.cat(columns)[order_N] for columns in zip(*gathered))
        return Ranked(ranks_N, lists_NK, ranked.seen)

    def plan(self) -> str:
        return "every rank has a copy of all weights"
