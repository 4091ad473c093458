"""A rank's share of a batch and of an evaluation; a single process has all of them.

Shapes: B rows of this rank in a batch, M most rows of any rank, N rows of the evaluation, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .ranks import Ranks

if TYPE_CHECKING:
    from torch import nn

    from ..data.batch import ClickBatch
    from ..models.dlrm_v4.model import DLRMv4
    from ..train.config import AnyTableOptimizer
    from ..train.loop import Optimizer, Recipe
    from ..train.optim import DenseOptimizer
    from .bags import BagTables
    from .catalogue import CatalogueShards
    from .tables import TorchRecTables

P = TypeVar("P")
T = TypeVar("T")


def own_part(batch: Any) -> Any:
    """What this process works on: its part of a batch that ranks share, else the whole batch."""
    return batch.part if isinstance(batch, SharedBatch) else batch


@dataclass(frozen=True, eq=False)
class SharedBatch(Generic[P]):
    """A rank's part of a batch, as the model of a single process reads a batch."""

    part: P
    step: int
    samples: int
    """Of all ranks."""
    own: int
    """Of this rank. One without any takes the first sample with weight 0: every rank takes part in every step."""
    ready: Any = None
    """The event after which the batch is there, if it was made on another CUDA stream."""
    following: P | None = None
    """This rank's part of the next batch, whose ids may be sent already."""
    following_ready: Any = None

    def __len__(self) -> int:
        return self.samples

    @property
    def weight(self) -> float:
        """The weight of its loss in that of the whole batch."""
        return self.own / self.samples

    def record_stream(self, stream: Any) -> None:
        self.part.record_stream(stream)  # type: ignore[attr-defined]


def announced(batches: Iterator[SharedBatch[P]], *, ahead: bool, last: int) -> Iterator[SharedBatch[P]]:
    """The batches, each with the part of the next one if `ahead`; none is read after `last` steps before it is asked
    for. Every rank has as many batches, so all of them see a next one or none of them does."""
    current = next(batches, None)
    while current is not None:
        following = next(batches, None) if ahead and current.step + 1 != last else None
        if following is None:
            yield current
            current = next(batches, None)
        else:
            yield replace(current, following=following.part, following_ready=following.ready)
            current = following


class SharedScores:
    """Logits and labels of an evaluation, each row scored by one rank."""

    def __init__(self, world: Ranks) -> None:
        self.world = world
        self._batches: list[Tensor] = []
        self._counts_R = np.zeros(world.size, np.int64)
        """Rows that each rank has scored."""

    def add(self, logits_B: Tensor, labels_B: Tensor, parts: Sequence[NDArray[np.int64]]) -> None:
        """Add this rank's part of a batch; `parts` are the positions of each rank's rows in it. A rank without rows
        passes values that are ignored."""
        own = parts[self.world.rank] + self._counts_R.sum()
        self._counts_R += [len(part) for part in parts]
        if len(own):
            rows_B = torch.from_numpy(own.astype(np.int32)).to(logits_B.device)
            columns = (logits_B.float().view(torch.int32), labels_B.float().view(torch.int32), rows_B)
            self._batches.append(torch.stack(columns, 1))

    def gather(self, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Logits and labels of all ranks in row order, on the host; `rows` is their number, where it is known. Each row
        must have been scored once."""
        total, most = int(self._counts_R.sum()), int(self._counts_R.max())
        # The bits of a logit and of a label, and the row. One message, from the device that scored.
        own_M3 = torch.zeros(most, 3, dtype=torch.int32, device=self.world.device)
        if self._batches:
            scored_B3 = torch.cat(self._batches)
            own_M3[: len(scored_B3)] = scored_B3
        parts = [part_M3[:count] for part_M3, count in zip(self.world.stack(own_M3).cpu(), self._counts_R.tolist())]
        logits_N, labels_N, rows_N = torch.cat(parts).unbind(1)
        order_N = rows_N.long()
        scored_N = torch.zeros(total, dtype=torch.bool)
        scored_N[order_N] = True
        if rows not in (None, total) or not scored_N.all():
            raise RuntimeError("a row was scored by no rank, or by two")
        gathered_2N = torch.empty(2, total)
        gathered_2N[0, order_N] = logits_N.contiguous().view(torch.float32)
        gathered_2N[1, order_N] = labels_N.contiguous().view(torch.float32)
        return gathered_2N[0], gathered_2N[1]


class Division:
    """A single process: it has all tables and takes every batch whole. `workloads.ranks` has that of several ranks."""

    def bags(
        self, optimizer: AnyTableOptimizer, *, eps: float = 1e-8, decay: float = 0.0, parts: int = 1
    ) -> BagTables | None:
        """Makes this rank's part of the tables of a click model; None where every process has all rows."""
        return None

    def with_bags(self, dense: DenseOptimizer, *, table_rate: float = 1.0) -> Optimizer:
        """The optimizer of a click model, where fbgemm has that of the tables."""
        return dense

    def tables(self, seed: int) -> TorchRecTables | None:
        """Makes this rank's part of the tables of dlrm-v4."""
        return None

    def clicks(self, recipe: Recipe, model: nn.Module, *, table_rate: float = 1.0) -> Recipe:
        """The training of a click model by steps of all ranks; tables have `table_rate` times the learning rate."""
        return recipe

    def catalogue(self, model: Any) -> CatalogueShards | None:
        """Divides the rows of items of a next-item model among the ranks, where that is asked for."""
        return None

    def sequences(self, recipe: Recipe, model: nn.Module) -> Recipe:
        """The training of a next-item model by steps of all ranks."""
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
