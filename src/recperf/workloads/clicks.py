"""What the trials of the click workloads (micro-dlrm, micro-dlrm-dram, dlrm) share."""

from __future__ import annotations

from typing import Any

from ..models.config import DLRMConfig
from ..models.dlrm import DLRM
from ..models.embeddings import StackedTables
from ..models.tables import HashedTable, SparseTables
from ..train.config import TrainConfig
from ..train.loop import Optimizer, Order, Recipe
from ..train.schedule import one_cycle

SCORING_BATCH = 8192


class DLRMTrialState:
    """The tables of a DLRM trial and the state that a checkpoint saves."""

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


def own_samples(batch: Any) -> int:
    """Samples of a batch that this process works on: all of them, or its part where ranks share a batch."""
    return len(getattr(batch, "part", batch))


def one_cycle_recipe(model: DLRM, optimizer: Optimizer, order: Order, settings: TrainConfig) -> Recipe:
    """A training whose learning rate rises and falls once over all planned epochs."""
    planned = settings.epochs * len(order)
    return Recipe(
        model=model,
        optimizer=optimizer,
        order=order,
        learning_rate=lambda step: one_cycle(step, planned, peak=settings.learning_rate, rise=settings.rise),
        epochs=settings.epochs,
        max_steps=settings.max_steps,
    )


def largest_product(model: DLRMConfig, batch: int) -> int:
    """FLOPs of the largest matrix product of a step."""
    stacks = [model.bottom, model.top_widths]
    if model.interaction == "dcn":
        stacks.append((model.interaction_width, model.cross_rank))
    return max(2 * batch * before * after for widths in stacks for before, after in zip(widths, widths[1:]))
