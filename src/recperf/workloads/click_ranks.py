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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..data.batch import ClickBatch, JaggedFeatures
from ..data.order import RankPart
from ..distributed.bags import BagTables, SharedFeatures
from ..distributed.balance import stride
from ..distributed.checkpoint import sharded_state
from ..distributed.config import DistributedConfig
from ..distributed.copies import copy_parts
from ..distributed.demand import Demand
from ..distributed.exchange import made_event
from ..distributed.placement import placed_by
from ..distributed.ranks import Ranks
from ..distributed.scores import Scores
from ..distributed.sharding import plan_text
from ..distributed.step import RankStep, Reduction, named_in, with_next
from ..errors import ConfigError
from ..measure.spans import span
from ..models.dlrm import DLRM, WrittenOutLoss
from ..train.checkpoint_shards import stacked
from ..train.loop import Order, Recipe
from ..train.optim import DenseOptimizer
from ..train.prefetch import prefetched
from .clicks import DLRMTrialState

CPU = torch.device("cpu")
TABLE = "embeddings.table_RD"
"""Under which name one process saves its tables, one behind the other."""


@dataclass(frozen=True, eq=False)
class SharedClicks:
    """A rank's part of a batch."""

    part: ClickBatch
    step: int
    samples: int
    """Of all ranks."""
    own: int
    following: JaggedFeatures | None = None
    """The bags of the batch after it, whose ids may travel already."""
    ready: Any = None
    """The event after which the batch is there, if it was made on another CUDA stream."""
    following_ready: Any = None

    def __len__(self) -> int:
        return self.samples

    def record_stream(self, stream: Any) -> None:
        self.part.record_stream(stream)


def share(own: ClickBatch, samples: int, part: RankPart, step: int = 0) -> SharedClicks:
    """A rank's `own` samples of a batch of `samples`. Every rank has as many bags as the one with the most samples."""
    features = own.features.trimmed()
    bags = SharedFeatures(
        features.keys, features.values_V, features.offsets_FB1, features.one_id_a_bag, largest_F=features.largest_F,
        bags=-(-samples // part.ranks),
    )  # fmt: skip
    return SharedClicks(replace(own, features=bags), step, samples, len(part.own(samples)))


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

    def batches(self, epoch: int, start: int = 0) -> Iterator[SharedClicks]:
        numbers = itertools.count(start)

        def shared(own: ClickBatch) -> SharedClicks:
            number = next(numbers)
            batch = share(own, self.order.whole_samples(number), self.part, epoch * len(self) + number)
            return replace(batch, ready=made_event(self.device))

        prepared = prefetched(self.order.batches(epoch, start), shared, self.device)
        for batch, following in with_next(prepared, lambda batch: self.ahead and batch.step + 1 != self.last):
            if following is not None:
                batch = replace(batch, following=following.part.features, following_ready=following.ready)
            yield batch


class RankModel:
    """Its loss is this rank's part of the whole batch's: those of all ranks add up to it."""

    def __init__(self, model: DLRM) -> None:
        self.model = model
        self.tables = model.embeddings if isinstance(model.embeddings, BagTables) else None

    def train(self, mode: bool = True) -> RankModel:
        self.model.train(mode)
        return self

    def loss(self, batch: SharedClicks) -> WrittenOutLoss:
        if self.tables:
            self.tables.follow(batch.following, batch.following_ready)
        return self.model.loss(batch.part) * (batch.own / batch.samples)


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
    """What a rank's trial of either model has beside one process's."""

    recipe: Recipe
    world: Ranks
    demand: Demand

    @property
    def rank_tables(self) -> BagTables | None:
        """None where every rank has all rows."""
        tables = self.model.embeddings
        return tables if isinstance(tables, BagTables) else None

    def share_out(self, settings: Any, options: DistributedConfig) -> None:
        """Make the recipe of one process a rank's."""
        tables = self.rank_tables
        parameters = self.model.dense_parameters()
        if tables is None:
            parameters = [*parameters, *self.model.embeddings.parameters()]
        model = RankModel(self.model)
        overlap, settings.reasons["overlap"] = self.world.overlaps(options, settings.threads)
        step = RankStep(
            model,
            self.optimizer,
            Reduction(named_in(self.model, parameters), self.world, overlap=overlap),
            before=tables.set_rate if tables else lambda rate: None,
            send_ahead=tables.sharded.send_ahead if tables else lambda: None,
            sync=settings.sync,
        )
        ahead = tables is not None and options.pipeline
        own = cast(DividedOrder, self.recipe.order).share(self.part)
        order = SharedOrder(own, self.part, ahead, self.recipe.max_steps, settings.device)
        self.recipe = replace(self.recipe, model=model, order=order, whole_step=step)

    def tables(self) -> list[tuple[str, int]]:
        return list(zip(self.model.config.features, self.model.config.rows))

    def plan(self) -> str:
        """Which rank holds what, as a table to read."""
        if self.rank_tables:
            return plan_text(self.rank_tables.parts)
        parts = []
        for table in self.demand.tables:
            parts += copy_parts(
                table.name, table.rows, table.dim, self.world, why=table.copied, state_width=table.state
            )
        return plan_text(parts)

    @property
    def part(self) -> RankPart:
        """The samples of every batch that this rank makes."""
        return RankPart(self.world.rank, self.world.size)

    @torch.no_grad()
    def scored(self, batches: Iterable[ClickBatch], samples: Callable[[int], int], rows: int) -> tuple[Tensor, Tensor]:
        """Logits and labels of all `rows` in their order, each made and scored by one rank; `samples` says how many all
        ranks have of a batch."""
        scores = Scores(self.world)
        for number, batch in enumerate(batches):
            own = share(batch, samples(number), self.part).part
            logits_B = self.model(own.dense_BD, own.features)
            scores.add(logits_B, own.labels_B, stride(samples(number), self.world.size))
        return scores.gather(rows)

    def state(self) -> dict[str, Any]:
        """This rank's parts of the tables, and the rest as all ranks have it: what one process saves, in parts."""
        state = super().state()
        if self.rank_tables:
            names, parts = self.rank_tables.names, sharded_state(self.rank_tables)
            state["model"] = {TABLE: stacked([parts[name] for name in names]), **state["model"]}
            if f"{names[0]}_state" in parts:
                state["optimizer"]["rows"] = stacked([parts[f"{name}_state"] for name in names])
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """The tables' parts were read to where they lie."""
        if self.rank_tables:
            state = {**state, "model": {name: part for name, part in state["model"].items() if name != TABLE}}
        super().restore(state)


def require_copies(options: DistributedConfig, demand: Demand, world: Ranks) -> None:
    """Refuse to divide tables that AdamW updates, alike on every rank."""
    placed_by(options, demand, world.size)
    for table, place in options.placements.items():
        if place != "device":
            raise ConfigError(
                f"distributed.placement {table}={place}: every device has a copy of the table, since AdamW changes "
                "every row in every step",
                where={"field": "distributed.placement"},
                fix=f"{table}=device",
            )
