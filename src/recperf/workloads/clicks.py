"""What the trials of the click workloads (micro-dlrm, micro-dlrm-dram, dlrm) share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..data.order import Samples
from ..execution.workload import Predictions, Prepared, ScoredRows
from ..models.config import DLRMConfig
from ..models.dlrm import DLRM
from ..models.embeddings import StackedTables
from ..models.tables import HashedTable, SparseTables
from ..train.baselines import bias_logits
from ..train.config import TrainConfig
from ..train.loop import Optimizer, Order, Position, Recipe
from ..train.metrics import binary_metrics
from ..train.schedule import one_cycle

SCORING_BATCH = 8192


class PreparedSamples(Prepared):
    """Training and validation rows in memory, on the host."""

    train: Samples | None
    valid: Samples

    def scored_rows(self) -> ScoredRows:
        return ScoredRows(self.valid.labels_N, self.valid.users_N, self.valid.items_N)

    def baseline_logits(self) -> dict[str, Tensor]:
        assert self.train is not None
        return bias_logits(self.train, self.valid)

    def predictions(self, logits_N: Tensor) -> Predictions:
        """Logits of the validation rows, with what these rows are."""
        return Predictions(logits_N.cpu(), self.valid.labels_N, self.valid.users_N, self.valid.items_N)


class DLRMTrialState:
    """The tables of a DLRM trial, the metrics of its predictions, and the state that a checkpoint saves."""

    model: DLRM
    optimizer: Optimizer

    def predictions(self, at: Position | None = None) -> Predictions:
        raise NotImplementedError

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        return binary_metrics(predictions.logits_N, predictions.labels_N)

    def score(self, at: Position | None = None) -> dict[str, float]:
        return self.metrics(self.predictions(at))

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
