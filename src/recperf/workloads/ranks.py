"""What a trial does otherwise as one of several ranks: its shards of the tables, its share of every batch, and steps in
which the gradients of all ranks are summed.

A batch is `train.batch_size` samples of all ranks together, dealt by counted work or in turn. A rank that gets none
takes the first sample with weight 0, because every rank must take part in every step.

Tables whose optimizer changes only the rows a step used are divided by TorchRec. AdamW changes every row in every step,
by its decay and its moments, which fbgemm's Adam does not do; with it every rank has a copy of all tables, and their
dense gradient is added up with the others.

Shapes: B samples of a rank, W of the whole batch, T positions or tokens of a rank's samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.batch import ClickBatch, HistoryBatch
from ..data.next_item_batches import SequenceBatch, SequenceOrder, WindowBatch
from ..data.order import RankShare
from ..data.streaming.history import Histories
from ..distributed.bags import BagTables, SharedFeatures
from ..distributed.balance import deal, stride
from ..distributed.catalogue import CatalogueShards, DividedItems
from ..distributed.exchange import made_event
from ..distributed.placement import placed_by, plan_text, shards_of
from ..distributed.rank_tables import ON_DEVICE, RankTables, agreed
from ..distributed.ranks import current
from ..distributed.shares import Division, SharedBatch, announced
from ..distributed.step import shared_step
from ..distributed.tables import TorchRecTables
from ..errors import ConfigError
from ..measure.spans import span
from ..models.dlrm import DLRM
from ..models.dlrm_v4.config import DLRMv4Config
from ..models.dlrm_v4.inputs import Inputs
from ..models.dlrm_v4.model import DLRMv4
from ..models.tiers.columns import stacked
from ..planning.memory import rank_demand
from ..planning.work import PlannedWorkload
from ..train.config import AnyTableOptimizer
from ..train.feeds import prefetched
from ..train.loop import Optimizer, Recipe
from ..train.optim import DenseOptimizer
from .dlrm_v4.plan import sample_work
from .dlrm_v4.steps import InputOrder, Numbered

CPU = torch.device("cpu")
STACKED, BY_NAME = "embeddings.table_RD", "tables."
"""Under which name one process saves the tables of a click model, one behind the other, and what the names of the
tables of dlrm-v4 begin with."""
UPDATES = f"{BY_NAME}updates"
"""Under which name one process saves the number of updates of the tables of dlrm-v4."""
Parts = list[NDArray[np.int64]]
"""The positions of each rank's samples in a batch."""


@dataclass(frozen=True, eq=False)
class SharedOrder:
    """The batches of an order, as one rank sees them."""

    length: int
    batches_of: Callable[[int, int], Iterator[Any]]
    """Yields the batches of an epoch from one on, or this rank's samples of them."""
    share: Callable[[Any, int], SharedBatch[Any]]
    """Makes this rank's share of a batch for a step."""
    ahead: bool
    """Whether a batch brings the one after it."""
    last: int
    """The number of steps that training ends with, if not with the data: what comes after is not looked at then."""
    device: torch.device
    """Where batches are used: for a GPU they are made on a stream of their own."""

    def __len__(self) -> int:
        return self.length

    def batches(self, epoch: int, start: int = 0) -> Iterator[SharedBatch[Any]]:
        steps = itertools.count(epoch * len(self) + start)

        def shared(batch: Any) -> SharedBatch[Any]:
            return replace(self.share(batch, next(steps)), ready=made_event(self.device))

        with closing(prefetched(self.batches_of(epoch, start), shared, self.device)) as prepared:  # type: ignore[type-var]
            yield from announced(prepared, ahead=self.ahead, last=self.last)


class DenseAndBags:
    """The dense optimizer, and the one that fbgemm has for the tables."""

    def __init__(self, dense: DenseOptimizer, tables: BagTables, table_rate: float) -> None:
        self.dense, self.tables, self.table_rate = dense, tables, table_rate

    def step(self, learning_rate: float | Tensor) -> None:
        with span("sparse_update"):
            self.tables.update(float(learning_rate) * self.table_rate)
        with span("dense_update"):
            self.dense.step(learning_rate)

    def gradient_norm(self) -> Tensor:
        return self.dense.gradient_norm()

    def state_dict(self) -> dict[str, Any]:
        updates = torch.tensor(self.tables.updates, dtype=torch.float64) if self.tables.rule.counts else None
        return {"dense": self.dense.state_dict(), "rows": None, "updates": updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dense.load_state_dict(state["dense"])
        self.tables.updates = int(state["updates"] or 0)


class RankDivision(Division):
    """One of several ranks: dense parameters as all ranks have them, and its own shards of the tables."""

    def __init__(self, prepared: Any, planned: PlannedWorkload | None) -> None:
        self.prepared, self.config, self.settings = prepared, prepared.config, prepared.settings
        self.world, self.options = current(), prepared.config.distributed
        self.own = RankShare(self.world.rank, self.world.size)
        self.sharded: RankTables | None = None
        """None where every rank has all rows."""
        self.shards: CatalogueShards | None = None
        """Of the items of a next-item model."""
        self.placed, self.tiers = None, ON_DEVICE
        if planned is not None:
            on_cpu = self.world.device == "cpu"
            self.demand = rank_demand(planned, self.world.size, self.options, on_cpu=on_cpu)
            self.placed = placed_by(self.options, self.demand, self.world.size)
            self.tiers = agreed(self.world, getattr(prepared, "tiers", ON_DEVICE))

    def plan(self) -> str:
        """Which rank holds what, as a table to read."""
        if self.shards is not None:
            parts = ", ".join(f"{size:,} on rank {rank}" for rank, size in enumerate(self.shards.sizes))
            return f"rows of items: {parts}; every rank has a copy of all other weights"
        if self.sharded is None and self.placed is None:
            return "every rank has a copy of all weights"
        return plan_text(self.sharded.parts if self.sharded else shards_of(self.placed or []))

    def bags(
        self, optimizer: AnyTableOptimizer, *, eps: float = 1e-8, decay: float = 0.0, parts: int = 1
    ) -> BagTables | None:
        reasons = self.settings.reasons
        if parts > 1:
            raise ConfigError(
                f"train.micro_batches is {parts}: a rank takes its share of a batch in one piece, since "
                "fbgemm updates tables in each backward pass",
                where={"field": "train.micro_batches"},
                fix="--train.micro-batches 1; more ranks have smaller parts",
            )
        if optimizer == "adamw":
            return None
        if decay:
            raise ConfigError(
                f"train.table_weight_decay is {decay}, which ranks have with adamw only",
                where={"field": "train.table_weight_decay"},
                fix="--train.table-weight-decay 0",
            )
        self.sharded = tables = BagTables(
            self.demand, self.options, self.world, optimizer=optimizer, eps=eps,
            device=self.settings.device, tiers=self.tiers,
        )  # fmt: skip
        kinds = ["fbgemm"] * bool(tables.sharded) + ["torch for data-parallel tables"] * bool(tables.copies.names)
        reasons["embedding"] = reasons["bag"] = f"{', '.join(kinds)}: several ranks"
        return tables

    def with_bags(self, dense: DenseOptimizer, *, table_rate: float = 1.0) -> Optimizer:
        return DenseAndBags(dense, self.sharded, table_rate) if isinstance(self.sharded, BagTables) else dense

    def tables(self, seed: int) -> TorchRecTables:
        self.sharded = tables = TorchRecTables(
            self.demand, self.options, self.world, self.config.train.table_optimizer, seed=seed,
            device=self.settings.device, tiers=self.tiers,
        )  # fmt: skip
        return tables

    def clicks(self, recipe: Recipe, model: nn.Module, *, table_rate: float = 1.0) -> Recipe:
        """Rank r of n makes the samples r, r + n, r + 2n... of a batch and no others."""
        parameters, whole = list(model.parameters()), cast(Any, recipe.order)
        if isinstance(model, DLRM):
            copied = model.embeddings.parameters() if self.sharded is None else ()
            parameters = [*model.dense_parameters(), *copied]

        def share(own: ClickBatch, step: int) -> SharedBatch[ClickBatch]:
            samples = whole.whole_samples(step % len(whole))
            return SharedBatch(self.part(own, samples), step, samples, len(self.own.own(samples)))

        batches, device = whole.share(self.own).batches, self.settings.device
        return self._divided(recipe, model, parameters, batches, share, device, table_rate=table_rate)

    def part(self, batch: ClickBatch, samples: int) -> ClickBatch:
        """Every rank has as many bags as the one with the most samples."""
        features = batch.features.trimmed()
        bags = SharedFeatures(
            features.keys, features.values_V, features.offsets_FB1, features.one_id_a_bag,
            largest_F=features.largest_F, bags=-(-samples // self.world.size),
        )  # fmt: skip
        return replace(batch, features=bags)

    def catalogue(self, model: Any) -> CatalogueShards | None:
        if self.options.kind != "row":
            return None
        self.shards = CatalogueShards(self.world, len(model.items_ID))
        model.divide(self.shards)
        return self.shards

    def sequences(self, recipe: Recipe, model: nn.Module) -> Recipe:
        order, parameters = recipe.order, list(model.parameters())
        assert isinstance(order, SequenceOrder)
        if self.shards is not None:
            items = cast(Any, model).items_ID
            recipe = replace(recipe, optimizer=DividedItems(recipe.optimizer, items, self.shards))
            parameters = [one for one in parameters if one is not items]
        return self._divided(recipe, model, parameters, order.windows, self._sequences, CPU)

    def _sequences(self, window: WindowBatch, step: int) -> SharedBatch[SequenceBatch]:
        """The loss of a rank is a sum over its positions, such that those of all ranks add up to the mean."""
        lengths_W, size = window.lengths_B, self.world.size
        balance = self.options.balance
        parts = deal(lengths_W.double().numpy(), size) if balance else stride(len(window), size)
        own = parts[self.world.rank]
        taken_B = torch.from_numpy(own if len(own) else np.zeros(1, np.int64))
        part = WindowBatch(window.events, window.begins_B[taken_B], lengths_W[taken_B]).gathered()
        before_B, whole = (lengths_W.cumsum(0) - lengths_W)[taken_B], int(lengths_W.sum())
        before_T = before_B.repeat_interleave(lengths_W[taken_B]).to(part.positions_T.device)
        weight = len(window) * (len(own) > 0) / (max(1, len(own)) * whole)
        part = replace(
            part,
            weights_T=torch.full(before_T.shape, weight, device=before_T.device),
            numbers_T=before_T + part.positions_T,
            whole=whole,
        )
        return SharedBatch(part, step, len(window), len(own))

    def histories(self, recipe: Recipe, model: DLRMv4) -> Recipe:
        inputs, train = cast(DealtOrder, recipe.order), self.config.train

        def share(batch: DealtBatch, step: int) -> SharedBatch[Numbered]:
            own = len(batch.parts[self.world.rank])
            return SharedBatch(Numbered(inputs.inputs(batch), step, counted=own > 0), step, batch.samples, own)

        dense, ratio = model.dense_parameters(), train.table_learning_rate / train.learning_rate
        return self._divided(recipe, model, dense, inputs.loaded, share, self.settings.device, table_rate=ratio)

    def dealt(self, inputs: Any) -> Any:
        share = HistoryShare(inputs.histories, inputs.model, self.world.rank, self.world.size, self.options.balance)
        return DealtOrder(inputs.order, cast(Histories, share), inputs.model, inputs.device, inputs.workers)

    def _divided(
        self,
        recipe: Recipe,
        module: nn.Module,
        parameters: Iterable[nn.Parameter],
        batches: Callable[[int, int], Iterator[Any]],
        share: Callable[[Any, int], SharedBatch[Any]],
        device: torch.device,
        *,
        table_rate: float = 1.0,
    ) -> Recipe:
        step = shared_step(
            recipe.model, recipe.optimizer, module, parameters, self.sharded, self.options, self.settings,
            table_rate=table_rate,
        )  # fmt: skip
        ahead = self.sharded is not None and self.options.pipeline
        order = SharedOrder(len(recipe.order), batches, share, ahead, recipe.max_steps, device)
        return replace(recipe, order=order, whole_step=step)

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's parts of the tables, and the rest as all ranks have it: what one process saves, in parts."""
        if self.sharded is None:
            return state
        parts, names, optimizer = self.sharded.sharded_state(), self.sharded.names, state["optimizer"]
        if isinstance(self.sharded, TorchRecTables):
            tables: dict[str, Any] = {f"{BY_NAME}{name}": part for name, part in parts.items()}
            if self.sharded.rule.counts:
                tables[UPDATES] = torch.tensor(self.sharded.updates, dtype=torch.float64)
        else:
            tables = {STACKED: stacked([parts[name] for name in names])}
            if f"{names[0]}_state" in parts:
                optimizer = {**optimizer, "rows": stacked([parts[f"{name}_state"] for name in names])}
        return {**state, "model": {**tables, **state["model"]}, "optimizer": optimizer}

    def restored(self, state: dict[str, Any]) -> dict[str, Any]:
        """The tables' parts were read to where they lie."""
        if self.sharded is None:
            return state
        if isinstance(self.sharded, TorchRecTables):
            self.sharded.updates = int(state["model"].get(UPDATES, 0))
        model = {name: one for name, one in state["model"].items() if not name.startswith((STACKED, BY_NAME))}
        return {**state, "model": model}


@dataclass(frozen=True, eq=False)
class DealtBatch(HistoryBatch):
    """A rank's samples of a batch, and what it knows about the whole batch."""

    parts: Parts = field(kw_only=True)
    whole_longest: int = field(kw_only=True)
    """Tokens of its longest row."""
    before_B: Tensor = field(kw_only=True)
    """Tokens of the whole batch before each sample of this rank."""

    @property
    def samples(self) -> int:
        """Of all ranks."""
        return sum(map(len, self.parts))


@dataclass(frozen=True, eq=False)
class HistoryShare:
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

    def batch(self, positions_W: NDArray[np.int64]) -> DealtBatch:
        tokens_W = self.histories.lengths(positions_W) + self.model.context_tokens + 1
        parts = self.parts(tokens_W)
        own = parts[self.rank] if len(parts[self.rank]) else np.zeros(1, np.int64)
        batch = self.histories.batch(positions_W[own])
        before_B = torch.from_numpy((np.cumsum(tokens_W) - tokens_W)[own])
        return DealtBatch(**vars(batch), parts=parts, whole_longest=int(tokens_W.max()), before_B=before_B)

    def parts(self, tokens_W: NDArray[np.int64]) -> Parts:
        if not self.balance:
            return stride(len(tokens_W), self.size)
        return deal(self.work(tokens_W.astype(np.float64)), self.size)

    @cached_property
    def work(self) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        return sample_work(self.model)


@dataclass(frozen=True, eq=False)
class DealtOrder(InputOrder):
    """The batches of a stream, of which a rank gathers its samples."""

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

    def parts(self, batch: HistoryBatch) -> Parts:
        assert isinstance(batch, DealtBatch)
        return batch.parts
