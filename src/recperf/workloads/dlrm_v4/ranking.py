"""Anchors with another item: the catalogue that they are ranked among, and the model's logits of such candidates.

In the published model some context features cross the candidate with the user or the hour, and the whole history
attends to the context, so that a candidate needs a pass over its own row. Where these features have one row, all
candidates share it.

Shapes: N scored anchors, P pairs of an anchor and an item, I items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.batch import HistoryBatch
from ...data.yambda.history import Histories
from ...data.yambda.schema import DAY_S, DRAWN, HISTORY
from ...data.yambda.store import EventStore, Queries
from ...models.dlrm_v4.inputs import Inputs
from ...models.dlrm_v4.model import DLRMv4
from ...models.dlrm_v4.padded import SharedHistory, can_share, padded_inputs
from ...stop import poll
from ...train.feeds import prepared_on_host
from ...train.ranking import RecentShares

Positions = np.ndarray[Any, Any]
AT_ONCE = 8192
"""Candidates of a history that are scored at a time."""


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
    model: DLRMv4,
    inputs: Callable[[Any], Inputs],
    histories: Histories,
    queries: Queries,
    batch_size: int,
) -> Tensor:
    """Logits of queries. Those that follow one another and differ in their items only share a pass over the history,
    where the model allows it."""
    if can_share(model):
        return _sharing(model, histories, queries)

    def parts() -> Iterator[Queries]:
        for start in range(0, len(queries), batch_size):
            yield queries[start : start + batch_size]

    return torch.cat([model(inputs(batch)) for batch in prepared_on_host(parts(), histories.queried)]).cpu()


def _sharing(model: DLRMv4, histories: Histories, queries: Queries) -> Tensor:
    same = [getattr(queries, name) for name in ("users_B", "ends_B", "times_B", "organic_B")]
    differs_B = np.any([column[1:] != column[:-1] for column in same], axis=0)
    edges = [0, *(np.flatnonzero(differs_B) + 1).tolist(), len(queries)]
    shared, device = SharedHistory(model), model.position_weight.device
    without_rates = Histories(histories.store, histories.config)

    def gathered(part: Queries) -> tuple[HistoryBatch, Tensor, Tensor | None]:
        """The first query as a batch, and of all of them items, artists and albums, and running rates."""
        items_C3 = np.column_stack([part.items_B, histories.store.catalogue_I2[part.items_B]]).astype(np.int64)
        rates = None if histories.rates is None else torch.from_numpy(histories.rates.of(part))
        return without_rates.queried(part[:1]), torch.from_numpy(items_C3), rates

    parts = (queries[first:last] for start, stop in zip(edges, edges[1:]) for first, last in _chunks(start, stop))
    logits = []
    for batch, items_C3, rates_CF in map(gathered, parts):
        poll()
        rows = zip(HISTORY, items_C3.to(device).T)
        candidate = [model.tables.table(name)[ids_C % model.config.table_rows[name]] for name, ids_C in rows]
        row = padded_inputs(model, batch.to(device))
        logits.append(shared.logits(row, torch.cat(candidate, 1), None if rates_CF is None else rates_CF.to(device)))
    return torch.cat(logits).cpu()


def _chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, AT_ONCE):
        yield first, min(stop, first + AT_ONCE)
