"""Anchors with another item, and simple rules for them: the catalogue that they are ranked among, the model's logits of
such candidates, and rules that know at each anchor what the model knows there.

In the published model some context features cross the candidate with the user or the hour, and the whole history
attends to the context, so that a candidate needs a pass over its own row. Where these features have one row, all
candidates share it.

The rules read running rates, the last items and the time of day. They are fitted on the newest training anchors and
read on through the hold-out, as the model does. A rule gets one matrix: the columns of `RATES`, then those of
`LastItems`.

Shapes: N scored anchors, P pairs of an anchor and an item, B queries, F features, I items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.batch import HistoryBatch
from ...data.events.kinds import ANCHORS, DAY_S, DRAWN, POSITIVE
from ...data.events.store import EventStore
from ...data.streaming.config import HistoryConfig
from ...data.streaming.features import HISTORY, RATES
from ...data.streaming.history import DAY_HOURS, HOUR_S, Histories
from ...data.streaming.queries import Queries
from ...data.streaming.rates import MEANS, NEIGHBOUR_COLUMNS, Groups, RunningRates
from ...models.dlrm_v4.inputs import Inputs
from ...models.dlrm_v4.model import DLRMv4
from ...models.dlrm_v4.padded import PaddedDLRMv4, can_share, padded_inputs
from ...stop import poll
from ...train import baselines
from ...train.baselines import regression
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
    taken: Callable[[slice | Positions], NDArray[np.bool_]]
    """Of which events the user took the item."""
    find_shares: Callable[[], RecentShares | None] = lambda: None
    """Computes `shares`, which only rankings need."""
    user_rows_are: str = "events before the row"

    @cached_property
    def shares(self) -> RecentShares | None:
        """How likely users see items; None where negatives were drawn, because then labels say it."""
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
        """Of an import all items; of others, whose catalogue may be of other events too, those of training anchors."""
        return self.rows_I.nonzero().squeeze(1) if self.store.imported is None else torch.arange(1, self.store.items)

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
        """The items that the user took in events before the anchor."""
        before = slice(int(self._first_N[row]), int(self.positions_N[row]))
        return torch.from_numpy(self.store.items_at(before)[self.taken(before)])


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
    shared, device = PaddedDLRMv4(model), model.position_weight.device
    without_rates = Histories(histories.store, histories.config)

    def gathered(part: Queries) -> tuple[HistoryBatch, Tensor, Tensor | None]:
        """The first query as a batch, and of all of them items, artists and albums, and running rates."""
        items_C3 = np.column_stack([part.items_B, histories.store.groups_IG[part.items_B]]).astype(np.int64)
        rates = None if histories.rates is None else torch.from_numpy(histories.rates.of(part))
        return without_rates.queried(part[:1]), torch.from_numpy(items_C3), rates

    parts = (
        queries[first : min(stop, first + AT_ONCE)]
        for start, stop in zip(edges, edges[1:])
        for first in range(start, stop, AT_ONCE)
    )
    logits = []
    for batch, items_C3, rates_CF in map(gathered, parts):
        poll()
        rows = zip(HISTORY, items_C3.to(device).T)
        candidate = [model.tables.table(name)[ids_C % model.config.table_rows[name]] for name, ids_C in rows]
        row = padded_inputs(model, batch.to(device), int(batch.history_offsets_B1[-1]))
        row["candidate_BW3"] = torch.cat(candidate, 1)[None]
        if rates_CF is not None:
            row["rates_BF"] = rates_CF.to(device)[None]
        logits.append(shared(**row)[0])
    return torch.cat(logits).cpu()


Features = NDArray[np.float32]
Rule = Callable[[Features], Tensor]
"""Logits of anchors, or of candidates in their place, from their features."""

LAST = 2
"""Last items that are columns of their own."""
PART = 1 << 18
_MEANS = [RATES.index(name) for name in MEANS]


class LastItems:
    """Columns of a query: the candidate and the last items as categories, hour, day of the week, and how often and with
    which share of positive labels the last items, and each of them with the candidate, came before."""

    def __init__(
        self, store: EventStore, rates: RunningRates, scan: int, unknown_E: NDArray[np.bool_] | None = None
    ) -> None:
        """Nothing is counted of the events in `unknown_E`."""
        self.store, self.rates = store, rates
        self.histories = Histories(store, HistoryConfig(length=LAST, strategy="last-n", scan=scan))
        kinds_E = store.kinds(slice(0, store.events))
        known_E = True if unknown_E is None else ~unknown_E
        listens_N = np.flatnonzero((kinds_E & np.uint8(ANCHORS) > 0) & known_E)
        items_N, times_N = store.items_at(listens_N), store.times_E[listens_N].astype(np.int64)
        positive_N = (kinds_E[listens_N] & np.uint8(POSITIVE)) > 0
        common = np.argsort(-np.bincount(items_N, minlength=store.items), kind="stable")[: baselines.MOST_CATEGORIES]
        self.category_I = np.full(store.items, baselines.MOST_CATEGORIES)
        self.category_I[common] = np.arange(len(common))
        last_NL = np.concatenate([self._last(self._events(part)) for part in self._parts(listens_N)])
        self.groups = [
            Groups.of(keys_N, times_N, positive_N)
            for back in range(LAST)
            for keys_N in (last_NL[:, back], _pair(last_NL[:, back], items_N))
        ]

    def _parts(self, positions_N: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        return np.array_split(positions_N, 1 + len(positions_N) // PART)

    def _events(self, positions_B: NDArray[np.int64]) -> Queries:
        return self.histories.events(positions_B, self.store.kinds(positions_B))

    def _last(self, queries: Queries) -> NDArray[np.int64]:
        """The last items before each query, the newest first; -1 where there is none."""
        batch = self.histories.queried(queries)
        items_T, offsets_B1 = batch.features["item_id"][0].numpy(), batch.history_offsets_B1.numpy()
        place_BL = offsets_B1[1:, None] - 1 - np.arange(LAST)
        there_BL = place_BL >= offsets_B1[:-1, None]
        padded_T = np.append(items_T.astype(np.int64), -1)
        return np.asarray(padded_T[np.where(there_BL, place_BL, -1)])

    @property
    def is_category(self) -> list[bool]:
        """Which of all columns of a rule's features are categories."""
        own = [True] * (1 + LAST) + [False] * (2 + 2 * len(self.groups))
        return [False] * len(RATES) + own

    def of(self, queries: Queries) -> Features:
        last_BL, times_B = self._last(queries), queries.times_B
        columns = [self.category_I[queries.items_B]]
        columns += [np.where(last_B < 0, np.nan, self.category_I[last_B]) for last_B in last_BL.T]
        columns += [times_B // HOUR_S % DAY_HOURS, times_B // DAY_S % 7]
        keys = [keys_B for last_B in last_BL.T for keys_B in (last_B, _pair(last_B, queries.items_B))]
        for groups, keys_B in zip(self.groups, keys):
            columns += self.rates.share_and_count(groups, keys_B, times_B)
        return np.stack(columns, 1).astype(np.float32)


def _pair(last_N: NDArray[np.int64], items_N: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray((last_N + 1) << 32 | items_N)


def running_means(features_NF: Features) -> Tensor:
    """The log odds of all outcomes so far, of the user's and of the item's, each smoothed, added up."""
    return torch.from_numpy(features_NF[:, _MEANS].sum(1))


def regressed(train_NF: Features, labels_N: NDArray[np.float32], columns: Sequence[str]) -> Rule:
    """A regression on some of the running rates."""
    which = [RATES.index(name) for name in columns]
    weights_F, intercept = regression(train_NF[:, which], labels_N)
    return lambda features_NF: torch.from_numpy(features_NF[:, which].astype(np.float64) @ weights_F + intercept)


def gradient_boosting(train_NF: Features, labels_N: NDArray[np.float32], is_category: list[bool]) -> Rule | None:
    """Gradient boosting on the running rates, on these and what is counted of the last items, or on both and the items
    themselves, whichever predicts the newest of the training anchors best; None where nothing can be fitted. The
    columns of neighbours are item-kNN's."""
    rates = [*range(len(RATES) - NEIGHBOUR_COLUMNS)]
    last = [*range(len(RATES), train_NF.shape[1])]
    options = [rates, [*rates, *(column for column in last if not is_category[column])], [*rates, *last]]
    newest_MF, newest_M = train_NF[-baselines.MOST_CHOOSING :], labels_N[-baselines.MOST_CHOOSING :]
    stop = round((1 - baselines.CHOOSING_SHARE) * len(newest_M))
    if not 0 < stop < len(newest_M):
        return None
    choices = [
        baselines.ColumnSet(newest_MF[:stop, which], newest_MF[stop:, which], _at(is_category, which))
        for which in options
    ]
    best = baselines.choose(choices, newest_M[:stop], newest_M[stop:])
    if best is None:
        return None
    which, trees = options[best[0]], best[1]
    if len(labels_N) > baselines.MOST_CHOOSING:
        trees = max(trees, baselines.FEWEST_TREES)
    model = baselines.untrained(labels_N, trees, _at(is_category, which))
    model.fit(train_NF[:, which], labels_N)
    return lambda features_NF: torch.from_numpy(model.decision_function(features_NF[:, which]))


def _at(is_category: list[bool], which: list[int]) -> list[bool]:
    return [is_category[column] for column in which]
