"""What counting says of the next item, added to the scores of a model.

Each part scores every item: the model, what followed the last items, items of the same users (item-kNN), popularity,
popularity just before the request, and the user's own items where they are taken again. A score is the sum of the
parts, each multiplied by a weight that is linear in a few facts about the history and the model's scores. So the parts
form one distribution, the normalised product of powers of theirs. An item without a count gets nothing from it.

Shapes: B histories, L items of a history (the newest first, 0 where there is none), I items (column k is item k + 1),
W entries of a sparse matrix, P parts, C facts, M moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...data.next_item_batches import SequenceBatch
from ...ops.followers import add_rows

MODEL, FOLLOWS, ALIKE, POPULARITY, RECENT, OWN = "model", "follows", "alike", "popularity", "recent", "own"
EARLIER = "earlier"
"""What followed the last items in the data of the run that this one started from."""
LAST = 10
"""Items of a history for which counts are added up."""
SMALLEST = 1e-4
"""The share of all counts of a history from which on an item stands out."""
FACTS = 5
"""One, the events of the history and of its last items, the model's best score and its lead over the tenth."""
LIST = 10


class CountedRows(nn.Module):
    """A sparse matrix of items."""

    offsets_I1: Tensor | None
    columns_W: Tensor
    values_W: Tensor
    decay_1: Tensor
    """The weight of each item of a history over that of the item after it."""

    def __init__(self, rows: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        for name in ("offsets_I1", "columns_W", "values_W", "decay_1"):
            self.register_buffer(name, rows[name] if rows else None)

    def sums(self, history_BL: Tensor, items: int) -> Tensor:
        """The sum of the rows of the last items of each history."""
        if self.offsets_I1 is None or not history_BL.shape[1]:
            return torch.zeros(len(history_BL), items, device=history_BL.device)
        last_BL = history_BL[:, :LAST]
        weights_L = torch.cat([self.decay_1**age for age in range(last_BL.shape[1])])
        return add_rows(self.offsets_I1, self.columns_W, self.values_W, last_BL, weights_L, items)


class Counting(nn.Module):
    """The counted parts and the weights of all. Without tables it waits for those of a checkpoint."""

    events_I: Tensor
    """Training events of each item."""
    moments_M: Tensor | None
    recent_MI: Tensor | None
    """Events in a time before each moment, which ascend."""
    weights_CP: Tensor
    means_C: Tensor
    scales_C: Tensor
    """Facts are compared with these."""

    def __init__(
        self, *, recent: bool, own: bool, started: bool, tables: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> None:
        super().__init__()
        self.parts = (MODEL, FOLLOWS, ALIKE, POPULARITY, *[RECENT] * recent, *[OWN] * own, *[EARLIER] * started)
        self.follows, self.alike, self.earlier = (
            CountedRows(tables.get(name) if tables else None) for name in (FOLLOWS, ALIKE, EARLIER)
        )
        others = tables["others"] if tables else {}
        for name in ("events_I", "moments_M", "recent_MI"):
            self.register_buffer(name, others.get(name))
        weights = {
            "weights_CP": torch.zeros(FACTS, len(self.parts), dtype=torch.float64),
            "means_C": torch.zeros(FACTS, dtype=torch.float64),
            "scales_C": torch.ones(FACTS, dtype=torch.float64),
        }
        weights["weights_CP"][0, 0] = 1.0
        for name, value in weights.items():
            self.register_buffer(name, value)

    def forward(self, logits_BI: Tensor, batch: SequenceBatch) -> Tensor:
        """Scores of all items by all parts, from the model's."""
        history_BL = batch.newest(batch.longest)
        weights_BP = (self.facts(logits_BI, history_BL) @ self.weights_CP).to(logits_BI.dtype)
        scores_BI = logits_BI * weights_BP[:, :1]
        for number, name in enumerate(self.parts[1:], 1):
            if bool(self.weights_CP[:, number].any()):
                scores_BI.addcmul_(self.counted(name, history_BL, batch), weights_BP[:, number, None])
        return scores_BI

    def counted(self, part: str, history_BL: Tensor, batch: SequenceBatch) -> Tensor:
        """The score of each item by a counted part."""
        if part == POPULARITY:
            return torch.log1p(self.events_I).expand(len(history_BL), -1)
        if part == RECENT:
            assert self.moments_M is not None
            assert self.recent_MI is not None
            assert batch.next_times_T is not None
            times_B = batch.next_times_T[batch.offsets_B1[1:] - 1]
            moments_B = (torch.searchsorted(self.moments_M, times_B, right=True) - 1).clamp(min=0)
            return torch.log1p(self.recent_MI[moments_B])
        counts_BI = self._own(history_BL) if part == OWN else getattr(self, part).sums(history_BL, len(self.events_I))
        return counts_BI.div_(counts_BI.sum(1, keepdim=True).clamp_(min=1e-30) * SMALLEST).log1p_()

    def facts(self, logits_BI: Tensor, history_BL: Tensor) -> Tensor:
        """One, and how the facts about each history and the model's scores differ from the usual."""
        best_BK = logits_BI.topk(min(LIST, logits_BI.shape[1]), dim=1)[0]
        last_BL = history_BL[:, :LAST]
        events_BL = torch.log1p(self.events_I[(last_BL - 1).clamp(min=0)]) * (last_BL > 0)
        facts_BC = torch.stack(
            [
                torch.ones_like(best_BK[:, 0]),
                torch.log1p((history_BL > 0).sum(1)),
                events_BL.sum(1) / (last_BL > 0).sum(1).clamp(min=1),
                best_BK[:, 0],
                best_BK[:, 0] - best_BK[:, -1],
            ],
            1,
        ).double()
        return (facts_BC - self.means_C) / self.scales_C

    def _own(self, history_BL: Tensor) -> Tensor:
        """The user's own items, each counted by the inverse of its age."""
        rows, length = history_BL.shape
        places_BL = torch.arange(rows, device=history_BL.device)[:, None] * len(self.events_I) + history_BL - 1
        inverse_BL = 1 / torch.arange(1.0, length + 1, device=history_BL.device).expand(rows, -1)
        there_BL, sums = history_BL > 0, torch.zeros(rows * len(self.events_I), device=history_BL.device)
        return sums.index_add_(0, places_BL[there_BL], inverse_BL[there_BL]).view(rows, -1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Tables may have any number of entries."""
        tables = ((getattr(self, name), f"{prefix}{name}.") for name in (FOLLOWS, ALIKE, EARLIER))
        for owner, before in ((self, prefix), *tables):
            for name in owner._buffers:
                if before + name in state_dict:
                    setattr(owner, name, state_dict[before + name].to(self.means_C.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)
