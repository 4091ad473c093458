"""micro-dlrm on several ranks. Its optimizer is AdamW, so each rank holds a copy of every table."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ...data.order import cut_part
from ...distributed.ranks import current
from ...plan.memory import rank_demand
from ..click_ranks import RankTrialState, SharedClicks, require_copies
from ..clicks import SCORING_BATCH
from .build import ClickTrial, PreparedClicks
from .config import planned


class PreparedClicksOnRanks(PreparedClicks):
    def trial(self, seed: int) -> ClickTrial:
        return RankClickTrial(self, seed)


class RankClickTrial(RankTrialState, ClickTrial):
    """One rank of a trial."""

    def __init__(self, prepared: PreparedClicksOnRanks, seed: int) -> None:
        self.world = current()
        options = prepared.config.distributed
        self.demand = rank_demand(planned(prepared.config), self.world.size, options, on_cpu=self.world.device == "cpu")
        require_copies(options, self.demand, self.world)
        super().__init__(prepared, seed)
        self.share_out(prepared.settings, options)

    def logits(self) -> Tensor:
        self.model.eval()
        rows = len(self.valid)
        batches = cut_part(self.valid, SCORING_BATCH, self.part)
        return self.scored(batches, lambda number: min(SCORING_BATCH, rows - number * SCORING_BATCH), rows)[0]

    def rows_of(self, batch: Any) -> Tensor:
        """The table rows that this rank's part of a batch looks up."""
        return super().rows_of(cast(SharedClicks, batch).part)
