"""A trained model of the next item: recommends for users of the store and for any history. hstu exports its vectors.

Shapes: B histories, L items that the model reads, D width, I items.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.events.item_table import exported, titles_of
from ...data.events.store import own_ids, own_name
from ...data.next_item import Targets
from ...data.next_item_batches import EventsOnDevice, SequenceBatch
from ...data.tables import Ids, Table, pyarrow
from ...errors import UsageError
from ...execution.serving import BY_ID, Encoded, Export, Served, TableExport
from ...execution.tables import placed_tables
from ...models.next_item.counting import LAST, LIST, SMALLEST, CountedRows, Counting
from ...models.next_item.model import NextItemModel, PaddedModel
from ...models.tiers.config import TablesConfig, scored_only
from ...stop import poll
from ...train.device import Settings
from ...train.next_item import histories, item_counts
from .build import ALL_ROWS, new_model, sequences_of, settings_of
from .config import NextItemRunConfig, estimate
from .data import SCORING_BATCH, SequenceSource

MEANINGS = {
    "rows_BL": "rows of the table `items` for the items of the history, the oldest first; the rest of a row is ignored",
    "lengths_B": "items of the history, at least 1",
    "times_BL": "times of these items in seconds",
    "query_times_BL": "for each item the time of the one after it; for the last the time of the request",
}
SHARE = f"log(1 + share / {SMALLEST}), where share is the item's part of the sum, over all items, of "
ADDED = f"`value` in counts.parquet for the last {LAST} items of the history, each times decay^(its age from 0)"
PARTS = {
    "model": "the product with the user's vector, over the temperature",
    "follows": f"{SHARE}{ADDED}",
    "alike": f"{SHARE}{ADDED}",
    "earlier": f"{SHARE}{ADDED}",
    "popularity": "log(1 + `events` in events.parquet)",
    "recent": "log(1 + `recent_events` in events.parquet)",
    "own": f"{SHARE}1 / (1 + age) for each time that the history has the item",
}
TABLES = ("follows", "alike", "earlier")
FACT_MEANINGS = [
    "1",
    "log(1 + items of the history that the program reads)",
    f"the mean of log(1 + `events`) of the last {LAST} items",
    "the model's highest score of all items",
    f"its lead over the score of rank {LIST}",
]
HELD_OUT = 1 << 16
"""Users whose held-out items are read at a time."""
PACED = 10_000_000
"""Events between which the usual time is that of all."""
LABELLESS = "this model predicts the next item, not a label: it scores no rows"
Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ItemHistories:
    """Items of users, the newest last, and their times; `nexts_B` are the times of the requests."""

    items: list[Longs]
    """Numbers from 1 on; at least one of each."""
    times: list[Longs] | None
    nexts_B: Longs | None

    def __getitem__(self, rows: slice) -> ItemHistories:
        nexts_B = None if self.nexts_B is None else self.nexts_B[rows]
        return ItemHistories(self.items[rows], self.times and self.times[rows], nexts_B)


class ServedItems(Served):
    """A history is a sequence of items; nothing else is known of a user."""

    users: Ids
    items: Ids
    roles: Mapping[str, tuple[str, ...]] = {"user": ("user",), "item": ("item",)}
    batch_size = SCORING_BATCH
    temperature = 1.0
    """Divisor of the product of two vectors."""

    def __init__(self, sequences: SequenceSource, settings: Settings, *, length: int) -> None:
        """`length`: how many of the latest items the model reads."""
        self.settings, self.length = settings, length
        self.data, self.data_digest = sequences.data, sequences.facts()["digest"]
        store, numbers_I = self.data.store, np.arange(1, self.data.items + 1) + self.data.padding_id
        if store is None:
            self.users = Ids.of("user", range(self.data.users), np.arange(self.data.users))
            self.items = Ids.of("item", numbers_I.tolist())
        else:
            own = own_ids(store, "item")
            users, items = own_name(store, "user"), own_name(store, "item")
            self.roles = {"user": (users,), "item": (items,)}
            self.users = Ids.of(users, own_ids(store, "user"), np.arange(self.data.users))
            self.items = Ids.of(items, [own[number] for number in numbers_I.tolist()])
            self.titles = titles_of(store, numbers_I)
        self.excludes_seen, self.timed = sequences.seen == "left-out", self.data.times_E is not None

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        raise UsageError(LABELLESS, fix="recperf recommend RUN")

    def logits(self, inputs: ItemHistories) -> Tensor:
        raise UsageError(LABELLESS, fix="recperf recommend RUN")

    def probabilities(self, logits_UI: Tensor) -> Tensor:
        """The probability that the next item is this one."""
        return logits_UI.softmax(1)

    def rank(self, users: Any) -> Tensor:
        """With the events of each user in the store before the request as the history."""
        indices = self.users.indices(users)
        ends_U = self.data.offsets_U1[indices + 1]
        if self.request_time is not None and self.data.times_E is not None:
            ranges = zip(self.data.offsets_U1[indices].tolist(), ends_U.tolist())
            earlier = (np.searchsorted(self.data.times_E[begin:end], self.request_time) for begin, end in ranges)
            ends_U = self.data.offsets_U1[indices] + np.fromiter(earlier, np.int64, len(indices))
        known = np.flatnonzero((indices >= 0) & (ends_U > self.data.offsets_U1[indices]))
        requested = self._stored(Targets(indices[known], ends_U[known]))
        if self.data.times_E is not None:
            requested = replace(requested, nexts_B=np.full(len(known), self.requested_at))
        return self._ranked(requested, known, len(indices))

    def rank_histories(self, histories: Sequence[Longs]) -> Tensor:
        """A history without times is read as if its items had come at the usual pace."""
        length, rows = self.length, [row for row, one in enumerate(histories) if len(one)]
        items, times, nexts_B = [np.asarray(histories[row])[-length:] + 1 for row in rows], None, None
        if self.data.times_E is not None:
            times = [self.requested_at - self.pace * np.arange(len(one), 0, -1) for one in items]
            nexts_B = np.full(len(rows), self.requested_at)
        return self._ranked(ItemHistories(items, times, nexts_B), np.array(rows, np.int64), len(histories))

    @property
    def requested_at(self) -> int:
        """When recommendations are requested; where that is not said, now, or a usual time after the newest event where
        that is earlier: a model knows nothing of later days."""
        assert self.data.times_E is not None
        return min(int(time()), self._newest + self.pace) if self.request_time is None else self.request_time

    @cached_property
    def _newest(self) -> int:
        assert self.data.times_E is not None
        return int(self.data.times_E.max())

    @cached_property
    def pace(self) -> int:
        """The median time between two events of a user; of many users it is that of some at equal distances."""
        assert self.data.times_E is not None
        users_U = np.arange(0, self.data.users, -(-len(self.data.times_E) // PACED))
        rows_P, events_P = histories(self.data, Targets(users_U, self.data.offsets_U1[users_U + 1]))
        gaps = np.diff(self.data.times_E[events_P])[rows_P[1:] == rows_P[:-1]]
        return max(1, int(np.median(gaps))) if len(gaps) else 1

    @abstractmethod
    def last(self, batch: SequenceBatch) -> Tensor:
        """The vector after the last position of each sequence."""

    @abstractmethod
    def item_vectors(self) -> Tensor:
        """The vectors of items 1 and up."""

    @cached_property
    def vectors_ID(self) -> Tensor:
        return self.item_vectors()

    def _stored(self, targets: Targets) -> ItemHistories:
        """The events of users before targets; a target after the last event of a user comes at the usual pace."""
        data, length = self.data, self.length
        ends_B = targets.ends_N
        begins_B = np.maximum(data.offsets_U1[targets.users_N], ends_B - length)
        parts = [slice(begin, end) for begin, end in zip(begins_B.tolist(), ends_B.tolist())]
        items = [data.items_E[part].astype(np.int64) for part in parts]
        if data.times_E is None:
            return ItemHistories(items, None, None)
        within_B = ends_B < data.offsets_U1[targets.users_N + 1]
        event_B = np.minimum(ends_B, len(data.times_E) - 1)
        nexts_B = np.where(within_B, data.times_E[event_B], data.times_E[ends_B - 1] + self.pace)
        return ItemHistories(items, [data.times_E[part] for part in parts], nexts_B)

    def _batch(self, part: ItemHistories) -> SequenceBatch:
        """Each history with an event after it, whose time is that of the request."""
        lengths_B = torch.tensor([len(one) for one in part.items])
        begins_B = torch.cumsum(lengths_B + 1, 0) - lengths_B - 1
        items_E = np.concatenate([np.append(one, 1) for one in part.items]).astype(np.int32)
        times_E = None
        if part.times is not None and part.nexts_B is not None:
            times_E = np.concatenate([np.append(one, after) for one, after in zip(part.times, part.nexts_B)])
        events = EventsOnDevice(replace(self.data, items_E=items_E, times_E=times_E), self.settings.device)
        return events.batch(begins_B, lengths_B)

    def scored(self, products_BI: Tensor, batch: SequenceBatch) -> Tensor:
        """Logits, from the products of the vectors of users and items."""
        return products_BI / self.temperature

    def _batches(self, requested: ItemHistories) -> Iterator[SequenceBatch]:
        for first in range(0, len(requested.items), self.batch_size):
            poll()
            yield self._batch(requested[first : first + self.batch_size])

    def _ranked(self, requested: ItemHistories, rows: Longs, count: int) -> Tensor:
        """Logits of all items for histories in these rows of `count`; without a history frequent items come first."""
        logits_BI = self._frequent.repeat(count, 1)
        first = 0
        for batch in self._batches(requested):
            part = torch.from_numpy(rows[first : first + len(batch)])
            logits_BI[part] = self.scored(self.last(batch) @ self.vectors_ID.t(), batch).float().cpu()
            first += len(part)
        return logits_BI

    @cached_property
    def _frequent(self) -> Tensor:
        """Logits by training events, of which one is spread over all items."""
        counts_I = torch.from_numpy(self.item_events().astype(np.float32))
        return ((counts_I + 1 / len(counts_I)) / (counts_I.sum() + 1)).log()

    def item_events(self) -> Longs:
        return self._item_events

    @cached_property
    def _item_events(self) -> Longs:
        return item_counts(self.data)

    def seen(self, user: int) -> Tensor:
        part = slice(*self.data.offsets_U1[user : user + 2].tolist())
        items_E = self.data.items_E[part]
        if self.request_time is not None and self.data.times_E is not None:
            items_E = items_E[self.data.times_E[part] < self.request_time]
        return torch.from_numpy(np.unique(items_E).astype(np.int64) - 1)

    def held_out(self, seed: int) -> Iterator[tuple[Table, ItemHistories]]:
        """The histories before test items, of some users at a time."""
        whole = self.data.test()
        for first in range(0, len(whole), HELD_OUT):
            test = whole[first : first + HELD_OUT]
            targets_N = self.data.items_E[test.positions_N].astype(np.int64) - 1
            columns = {
                self.users.role: self.users.values.take(pyarrow().array(test.users_N)),
                self.items.role: self.items.values.take(pyarrow().array(targets_N)),
            }
            yield pyarrow().table(columns), self._stored(test)


class ServedSequences(ServedItems):
    model: NextItemModel

    def __init__(self, config: NextItemRunConfig) -> None:
        self.config, self.temperature = config, config.model.temperature
        super().__init__(sequences_of(config), settings_of(config), length=config.model.max_length)
        tiers = ALL_ROWS
        if config.some_rows:
            # The table lies where it fits now, without an optimizer, beside the vectors of all items.
            table = estimate(config).table_bytes
            counted = replace(estimate(config), state_bytes=0, memory={"table": table, "vectors": 2 * table})
            tables = TablesConfig(folder=config.tables.folder)
            tiers = scored_only(placed_tables(tables, counted, self.settings.device))
        self.settings.reasons["tables"] = tiers.why
        self.model = new_model(config, self.data, 0, self.settings, tiers)
        if config.model.counts == "on":
            # Its tables are those of the checkpoint.
            counting = Counting(
                recent=self.data.times_E is not None, own=not self.excludes_seen, started=config.start.run is not None
            )
            self.model.counting = counting.to(self.settings.device)

    def last(self, batch: SequenceBatch) -> Tensor:
        return self.model.last(batch)

    def scored(self, products_BI: Tensor, batch: SequenceBatch) -> Tensor:
        return self.model.scored(products_BI, batch)

    def item_vectors(self) -> Tensor:
        return self.model.item_vectors()

    def export(self, example: Table, inputs: ItemHistories) -> Export:
        store, items, rows_I = self.data.store, self.items.values, np.arange(len(self.items))
        vectors = "vectors of items, of length 1"
        embeddings = f"embeddings of items by {BY_ID}"
        known = store and exported(store, self.items.role, items, rows_I + 1 + self.data.padding_id)
        return Export(
            tables=[
                TableExport(name="vectors", weight_RW=self.vectors_ID, ids=items, rows_I=rows_I, meaning=vectors),
                TableExport(
                    name="items", weight_RW=self.model.embedded(), ids=items, rows_I=rows_I + 1, meaning=embeddings
                ),
            ],
            program=copy.deepcopy(PaddedModel(self.model)).cpu(),
            inputs=self._padded(inputs),
            meanings=MEANINGS,
            output="vectors of users, of length 1: the score of an item is the product with its vector",
            example=example,
            logits_B=torch.cat([self.last(batch) for batch in self._batches(inputs)]),
            more={**({"items": known} if known else {}), **self._counts()},
            vectors_IW=self.vectors_ID,
            encoding={} if self.model.counting is None else {"counting": self._weights(self.model.counting)},
        )

    def _counts(self) -> dict[str, Table]:
        """What counting adds to the scores, by own ids."""
        counting, arrow, ids = self.model.counting, pyarrow(), self.items.values
        if counting is None:
            return {}
        tables = []
        for name in TABLES:
            rows: CountedRows = getattr(counting, name)
            if rows.offsets_I1 is not None:
                lengths_I, columns_W = rows.offsets_I1.diff().cpu().numpy(), rows.columns_W.cpu().numpy()
                items_W = arrow.array(np.repeat(np.arange(len(ids)), lengths_I))
                columns = {"part": arrow.array([name] * len(columns_W)), "item": ids.take(items_W)}
                columns |= {"other": ids.take(arrow.array(columns_W)), "value": rows.values_W.cpu().numpy()}
                tables.append(arrow.table(columns))
        events = {"id": ids, "events": counting.events_I.cpu().numpy()}
        if counting.recent_MI is not None:
            events["recent_events"] = counting.recent_MI[-1].cpu().numpy()
        return {"counts": arrow.concat_tables(tables), "events": arrow.table(events)}

    def _weights(self, counting: Counting) -> dict[str, Any]:
        """What a server needs to add the counts up."""
        decays = {name: getattr(counting, name).decay_1 for name in TABLES}
        return {
            "score": "sum over parts of the part's score of an item times its weight, which is the sum over facts of "
            "(fact - mean) / scale times the number of that fact and part",
            "parts": {name: PARTS[name] for name in counting.parts},
            "facts": FACT_MEANINGS,
            "weights": dict(zip(counting.parts, counting.weights_CP.t().tolist())),
            "means": counting.means_C.tolist(),
            "scales": counting.scales_C.tolist(),
            "decays": {name: float(decay_1) for name, decay_1 in decays.items() if decay_1 is not None},
            "temperature": self.temperature,
        }

    def _padded(self, part: ItemHistories) -> dict[str, Tensor]:
        """The inputs of the exported program."""
        shape = len(part.items), self.config.model.max_length
        rows_BL = torch.zeros(shape, dtype=torch.int64)
        inputs = {"rows_BL": rows_BL, "lengths_B": torch.tensor([len(one) for one in part.items])}
        timed = self.config.model.time_buckets > 0 and part.times is not None and part.nexts_B is not None
        if timed:
            inputs |= {name: torch.zeros(shape, dtype=torch.int64) for name in ("times_BL", "query_times_BL")}
        for row, items in enumerate(part.items):
            rows_BL[row, : len(items)] = torch.from_numpy(items)
            if timed and part.times is not None and part.nexts_B is not None:
                after = np.append(part.times[row][1:], part.nexts_B[row])
                inputs["times_BL"][row, : len(items)] = torch.from_numpy(part.times[row])
                inputs["query_times_BL"][row, : len(items)] = torch.from_numpy(after)
        return inputs
