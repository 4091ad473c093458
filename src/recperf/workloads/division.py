"""How a trial shares its work with other ranks; a single process shares nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ..distributed.ranks import current
from ..execution.workload import load

if TYPE_CHECKING:
    from ..data.batch import ClickBatch
    from ..distributed.bags import BagTables
    from ..distributed.tables import TorchRecTables
    from ..models.dlrm import DLRM
    from ..models.dlrm_v4.model import DLRMv4
    from ..models.next_item.model import NextItemHSTU
    from ..plan.work import PlannedWorkload
    from ..train.loop import Optimizer, Recipe
    from ..train.optim import DenseOptimizer


T = TypeVar("T")


class Division:
    """A single process: it has all tables and takes every batch whole. `RankDivision` is that of several ranks."""

    def bags(self) -> BagTables | None:
        """Makes this rank's part of the tables of a click model; None where every process has all rows."""
        return None

    def with_bags(self, dense: DenseOptimizer) -> Optimizer:
        """The optimizer of a click model, where fbgemm has that of the tables."""
        return dense

    def tables(self, seed: int) -> TorchRecTables | None:
        """Makes this rank's part of the tables of dlrm-v4."""
        return None

    def clicks(self, recipe: Recipe, model: DLRM) -> Recipe:
        """The training of a click model by steps of all ranks."""
        return recipe

    def sequences(self, recipe: Recipe, model: NextItemHSTU) -> Recipe:
        """The training of hstu by steps of all ranks."""
        return recipe

    def histories(self, recipe: Recipe, model: DLRMv4) -> Recipe:
        """The training of dlrm-v4 by steps of all ranks."""
        return recipe

    def dealt(self, inputs: T) -> T:
        """The batches of dlrm-v4, of which each rank gathers its samples."""
        return inputs

    def part(self, batch: ClickBatch, samples: int) -> ClickBatch:
        """What this rank scores of a batch of `samples` rows, of which it has made its own."""
        return batch

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state for a checkpoint, with this rank's parts of the tables."""
        return state

    def restored(self, state: dict[str, Any]) -> dict[str, Any]:
        """What the model and its optimizer read of a checkpoint."""
        return state


def division(prepared: Any, planned: PlannedWorkload | None = None) -> Division:
    """How the trials of this process share their work."""
    if current().size == 1:
        return Division()
    divided: Division = load("recperf.workloads.ranks:RankDivision")(prepared, planned)
    return divided
