"""Anchors with another item: the catalogue that they are ranked among, and the model's logits of such candidates.

Some context features cross the candidate with the user or the hour, and the whole history attends to the context, so a
candidate needs a pass over its own row: nothing of the history can be shared between candidates.

Shapes: N scored anchors, P pairs of an anchor and an item, I items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.yambda.history import Histories
from ...data.yambda.schema import DAY_S, DRAWN
from ...data.yambda.store import EventStore, Queries
from ...models.dlrm_v4.inputs import Inputs
from ...train.prefetch import prepared_on_host
from ...train.ranking import RecentShares

Positions = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class EventCatalogue:
    """The items of training anchors, as candidates for scored anchors."""

    store: EventStore
    train_items_N: Tensor
    positions_N: Positions
    """Events that are scored, in their order."""
    repeats: float
    find_shares: Callable[[], RecentShares | None] = lambda: None
    """Computes `shares`, which only rankings need."""
    user_rows_are: str = "events before the row"
    not_ranked = None

    @cached_property
    def shares(self) -> RecentShares | None:
        """How likely users meet items; None where negatives were drawn, because then labels say it."""
        return self.find_shares()

    @property
    def meeting_is(self) -> str | None:
        return None if self.shares is None else recent(self.store, self.shares)

    def meeting(self, rows_P: Tensor, items_P: Tensor) -> Tensor:
        assert self.shares is not None
        times_P = self.store.times_E[self.positions_N[rows_P.numpy()]].astype(np.int64)
        return self.shares(items_P, torch.from_numpy(times_P))

    @cached_property
    def rows_I(self) -> Tensor:
        """Training anchors of each item."""
        return torch.bincount(self.train_items_N, minlength=self.store.items)

    @cached_property
    def items_I(self) -> Tensor:
        return self.rows_I.nonzero().squeeze(1)

    @cached_property
    def _first_N(self) -> Positions:
        """The first event of each anchor's user."""
        return np.asarray(self.store.user_first_U1[self.store.users_of(self.positions_N)].astype(np.int64))

    @cached_property
    def user_rows_N(self) -> Tensor:
        """Events before the anchor, without those that an import drew."""
        if self.store.stored_per_event == 1:
            return torch.from_numpy(self.positions_N - self._first_N)
        happened_E = (self.store.kinds(slice(0, self.store.events)) & np.uint8(DRAWN)) == 0
        before_E1 = np.concatenate([[0], np.cumsum(happened_E)])
        return torch.from_numpy(before_E1[self.positions_N] - before_E1[self._first_N])

    @cached_property
    def item_rows_N(self) -> Tensor:
        return self.rows_I[torch.from_numpy(self.store.items_at(self.positions_N))]

    def seen(self, row: int) -> Tensor:
        """The items of the user's events before the anchor, without those that an import drew."""
        before = slice(int(self._first_N[row]), int(self.positions_N[row]))
        happened = (self.store.kinds(before) & np.uint8(DRAWN)) == 0
        return torch.from_numpy(self.store.items_at(before)[happened])


def recent(store: EventStore, shares: RecentShares) -> str:
    """A description of recent shares, for the report."""
    if store.time_order != "time":
        return "its share of the events before"
    return f"its share of the events of the {shares.seconds / DAY_S:,.3g} days before"


@torch.no_grad()
def candidate_logits(
    model: Callable[[Inputs], Tensor],
    inputs: Callable[[Any], Inputs],
    histories: Histories,
    positions_P: Positions,
    items_P: Positions,
    batch_size: int,
) -> Tensor:
    """Logits of anchors, given as positions of events, if their items were these."""
    queries = replace(histories.events(positions_P, histories.store.kinds(positions_P)), items_B=items_P)

    def parts() -> Iterator[Queries]:
        for start in range(0, len(queries), batch_size):
            yield queries[start : start + batch_size]

    return torch.cat([model(inputs(batch)) for batch in prepared_on_host(parts(), histories.queried)]).cpu()
