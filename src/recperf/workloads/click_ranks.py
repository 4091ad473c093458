"""A trial of dlrm or micro-dlrm on several ranks: the same model and order, each rank with its share of every batch.

A batch is `train.batch_size` samples of all ranks together; rank r of n makes its samples r, r + n, r + 2n... and no
others. A rank that gets none takes the first sample with weight 0, because every rank must take part in every step.

Tables whose optimizer changes only the rows a step used are divided by TorchRec. AdamW changes every row in every step,
by its decay and its moments, which fbgemm's Adam does not do; with it every rank has a copy of all tables, and their
dense gradient is added up with the others.

Shapes: B samples of a batch, F features, V ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..data.batch import ClickBatch
from ..data.order import RankPart
from ..data.rows import Split
from ..distributed.bags import BagTables, SharedFeatures
from ..distributed.exchange import made_event
from ..distributed.placement import placed_by, plan_text, shards_of
from ..distributed.rank_tables import ON_DEVICE, agreed
from ..distributed.ranks import current
from ..distributed.shares import SharedBatch, announced
from ..distributed.step import shared_step
from ..errors import ConfigError
from ..measure.spans import span
from ..models.dlrm import DLRM
from ..models.streams import SideStreams
from ..plan.memory import rank_demand
from ..plan.work import PlannedWorkload
from ..train.checkpoint_tensors import stacked
from ..train.feeds import prefetched
from ..train.loop import Optimizer, Order, Recipe
from ..train.optim import DenseOptimizer, make_dense
from .clicks import DLRMTrialState
from .dlrm.build import DLRMTrial, PreparedDLRM
from .dlrm.config import planned as dlrm_planned
from .micro_dlrm.build import ClickTrial, PreparedClicks
from .micro_dlrm.config import planned as micro_planned

CPU = torch.device("cpu")
TABLE = "embeddings.table_RD"
"""Under which name one process saves its tables, one behind the other."""


def share(own: ClickBatch, samples: int, part: RankPart, step: int = 0) -> SharedBatch[ClickBatch]:
    """A rank's `own` samples of a batch of `samples`. Every rank has as many bags as the one with the most samples."""
    features = own.features.trimmed()
    bags = SharedFeatures(
        features.keys, features.values_V, features.offsets_FB1, features.one_id_a_bag, largest_F=features.largest_F,
        bags=-(-samples // part.ranks),
    )  # fmt: skip
    return SharedBatch(replace(own, features=bags), step, samples, len(part.own(samples)))


class DividedOrder(Order, Protocol):
    """An order that can make only a part of each batch."""

    def share(self, part: RankPart) -> DividedOrder: ...

    def whole_samples(self, number: int) -> int:
        """Samples of a batch of an epoch, those of all ranks together."""
        ...


@dataclass(frozen=True, eq=False)
class SharedOrder:
    """The batches of an order, as one rank sees them: it makes only its own samples."""

    order: DividedOrder
    """Makes this part."""
    part: RankPart
    ahead: bool = False
    """Whether a batch brings the bags of the one after it."""
    last: int = 0
    """The number of steps that training ends with, if not with the data: what comes after is not looked at then."""
    device: torch.device = CPU
    """Where batches are used: for a GPU they are made on a stream of their own."""

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int = 0) -> Iterator[SharedBatch[ClickBatch]]:
        numbers = itertools.count(start)

        def shared(own: ClickBatch) -> SharedBatch[ClickBatch]:
            number = next(numbers)
            batch = share(own, self.order.whole_samples(number), self.part, epoch * len(self) + number)
            return replace(batch, ready=made_event(self.device))

        prepared = prefetched(self.order.batches(epoch, start), shared, self.device)
        return announced(prepared, ahead=self.ahead, last=self.last)


class DenseAndBags:
    """The dense optimizer, and the one that fbgemm has for the tables."""

    def __init__(self, dense: DenseOptimizer, tables: BagTables) -> None:
        self.dense, self.tables = dense, tables

    def step(self, learning_rate: float | Tensor) -> None:
        with span("sparse_update"):
            self.tables.update(float(learning_rate))
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


class RankTrialState(DLRMTrialState):
    """What a rank's trial of either model has beside that of a single process."""

    recipe: Recipe
    planned: Callable[[Any], PlannedWorkload]
    """Counts the work of a config."""

    def __init__(self, prepared: Any, seed: int) -> None:
        config, self.world = prepared.config, current()
        options, on_cpu = config.distributed, self.world.device == "cpu"
        self.demand = rank_demand(type(self).planned(config), self.world.size, options, on_cpu=on_cpu)
        self.placed = placed_by(options, self.demand, self.world.size)
        self.tables_in = agreed(self.world, getattr(prepared, "tiers", ON_DEVICE))
        super().__init__(prepared, seed)  # type: ignore[call-arg]  # that of a single process
        tables, parameters = self.rank_tables, self.model.dense_parameters()
        if tables is None:
            parameters = [*parameters, *self.model.embeddings.parameters()]
        settings = prepared.settings
        step = shared_step(self.model, self.optimizer, self.model, parameters, tables, options, settings)
        ahead = tables is not None and options.pipeline
        own = cast(DividedOrder, self.recipe.order).share(self.part)
        order = SharedOrder(own, self.part, ahead, self.recipe.max_steps, settings.device)
        self.recipe = replace(self.recipe, order=order, whole_step=step)

    @property
    def rank_tables(self) -> BagTables | None:
        """None where every rank has all rows."""
        tables = self.model.embeddings
        return tables if isinstance(tables, BagTables) else None

    def rows_of(self, batch: Any) -> Tensor:
        """The table rows that this rank's part of a batch looks up."""
        if self.rank_tables:
            return self.rank_tables.rows_of(batch.features)
        return cast(Tensor, super().rows_of(batch))  # type: ignore[misc]

    def tables(self) -> list[tuple[str, int]]:
        return list(zip(self.model.config.features, self.model.config.rows))

    def plan(self) -> str:
        """Which rank holds what, as a table to read."""
        return plan_text(self.rank_tables.parts if self.rank_tables else shards_of(self.placed))

    @property
    def part(self) -> RankPart:
        """The samples of every batch that this rank makes."""
        return RankPart(self.world.rank, self.world.size)

    def held_out(self, split: Split = "valid") -> Iterator[tuple[ClickBatch, int]]:
        for batch, samples in super().held_out(split):
            yield share(batch, samples, self.part).part, samples

    def state(self) -> dict[str, Any]:
        """This rank's parts of the tables, and the rest as all ranks have it: what one process saves, in parts."""
        state = super().state()
        if self.rank_tables:
            names, parts = self.rank_tables.names, self.rank_tables.sharded_state()
            state["model"] = {TABLE: stacked([parts[name] for name in names]), **state["model"]}
            if f"{names[0]}_state" in parts:
                state["optimizer"]["rows"] = stacked([parts[f"{name}_state"] for name in names])
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """The tables' parts were read to where they lie."""
        if self.rank_tables:
            state = {**state, "model": {name: part for name, part in state["model"].items() if name != TABLE}}
        super().restore(state)


class RankDLRMTrial(RankTrialState, DLRMTrial):
    """One rank of a trial of dlrm."""

    planned = staticmethod(dlrm_planned)

    def __init__(self, prepared: PreparedDLRM, seed: int) -> None:
        slices = prepared.config.train.micro_batches
        if slices > 1:
            raise ConfigError(
                f"train.micro_batches is {slices}: a rank takes its part of a batch in one piece, since fbgemm updates "
                "tables in each backward pass",
                where={"field": "train.micro_batches"},
                fix="--train.micro-batches 1; more ranks have smaller parts",
            )
        super().__init__(prepared, seed)

    def _model(self, seed: int, streams: SideStreams) -> DLRM:
        prepared, config, tables = self.prepared, self.prepared.config, None
        reasons, train, device = prepared.settings.reasons, config.train, prepared.settings.device
        if train.optimizer != "adamw":
            tables = BagTables(
                self.demand, config.distributed, self.world, optimizer=train.optimizer, eps=train.eps, device=device,
                tiers=self.tables_in,
            )  # fmt: skip
            kinds = ["fbgemm"] * bool(tables.sharded) + ["torch for data-parallel tables"] * bool(tables.copies.names)
            reasons["embedding"] = reasons["bag"] = f"{', '.join(kinds)}: several ranks"
        return prepared.make_model(seed, streams, tables)

    def _optimizer(self, streams: SideStreams) -> Optimizer:
        if self.rank_tables is None:
            return super()._optimizer(streams)
        train, plain = self.prepared.config.train, not self.prepared.switches.optimizer
        groups = [(self.model.dense_parameters(), 0.0)]
        return DenseAndBags(make_dense(train.optimizer, groups, eps=train.eps, plain=plain), self.rank_tables)


class RankClickTrial(RankTrialState, ClickTrial):
    """One rank of a trial of micro-dlrm. Its optimizer is AdamW, so each rank holds a copy of every table."""

    planned = staticmethod(micro_planned)


class PreparedDLRMOnRanks(PreparedDLRM):
    def trial(self, seed: int) -> DLRMTrial:
        return RankDLRMTrial(self, seed)


class PreparedClicksOnRanks(PreparedClicks):
    def trial(self, seed: int) -> ClickTrial:
        return RankClickTrial(self, seed)
