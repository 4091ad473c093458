"""A trained dlrm-v4: scores items for users by the histories in the event store.

Shapes: N rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.batch import HistoryBatch
from ...data.events.item_features import titles_of
from ...data.events.kinds import DRAWN, LISTEN_PLUS
from ...data.events.row_queries import RowQueries
from ...data.events.store import Queries, originals
from ...data.streaming.features import CROSSES, RATES
from ...data.streaming.history import Histories
from ...data.streaming.rates import PRECISION, PRIOR, RECENT
from ...data.tables import Ids, Table, pyarrow
from ...execution.serving import BY_ID, Encoded, Export, Served, TableExport, free_name
from ...execution.tables import placed_tables
from ...models.dlrm_v4.inputs import Inputs, prepare
from ...models.dlrm_v4.model import DLRMv4
from ...models.dlrm_v4.padded import PaddedDLRMv4, can_share, padded_inputs
from ...models.tiers.config import TablesConfig, scored_only
from ...stop import poll
from ...train.feeds import prepared_on_host
from .build import make_model, settings_of
from .config import DLRMv4WorkloadConfig, estimate
from .data import EventWindows, opened
from .ranking import candidate_logits, recent

MEANINGS = {
    "context_BCW": "embeddings of the context features: uid, then the cross features in the order of the tables",
    "item_BLW": "embeddings of the items of the history, the newest last; places before it are ignored",
    "artist_BLW": "embeddings of their artists",
    "album_BLW": "embeddings of their albums",
    "candidate_BW3": "embeddings of the candidate's item, artist and album side by side",
    "actions_BL": "actions of the history as bits: 1 listened, 2 liked, 4 skipped",
    "times_BL": "times of the history in seconds",
    "lengths_B": "events of the history, at least 0",
    "query_times_B": "time of the last event of the history; without one, of the candidate",
    "rates_BF": f"running rates before the candidate: {', '.join(RATES)}. `overall` is the log odds of the share of "
    "positive listens. The shares of a user, an item, an artist and pairs of them, and of their last "
    f"{RECENT} listens (`recent`), are smoothed with {PRIOR:g} listens at the overall share, as log odds less "
    "`overall`. `user_effect` is the sum of the user's outcomes less their probability by `overall` and `item` at the "
    f"time, over {PRECISION:g} plus the sum of p (1 - p); `item_effect` the same of the item, by `overall` and "
    "`user_effect`. Counts (`listens`; `item_trend` of the last 64th of the time) are log(1 + count) / 4, "
    "`since_last_event` is log(1 + seconds) / 8. The outcomes that `neighbours` are computed from are not exported",
}


class ServedHistories(Served):
    """Rows have a user and an item, and maybe a time."""

    users: Ids
    items: Ids

    def __init__(self, config: DLRMv4WorkloadConfig) -> None:
        self.config = config
        self.settings = settings_of(config)
        self.store = opened(config.data)
        self.data_digest = self.store.digest
        self.row_queries = RowQueries(self.store)
        self.users, self.items = self.row_queries.users, self.row_queries.items
        self.titles = titles_of(self.store, self.items.numbers_V)
        self.roles = {role: self.row_queries.spellings(role) for role in ("user", "item")}
        self.optional = {"time": self.row_queries.spellings("time")} if self.row_queries.has_times else {}
        pin = self.settings.device.type == "cuda"
        if config.model.rates_hidden:
            self.histories = self.windows.gatherer(pin=pin)
        else:
            self.histories = Histories(self.store, config.data.history, pin=pin)
        counted = estimate(config)
        # Without what a training step needs: scoring takes little beside the tables.
        counted = replace(counted, memory={"tables": counted.table_bytes + counted.state_bytes})
        tables = TablesConfig(folder=config.tables.folder)
        tiers = scored_only(placed_tables(tables, counted, self.settings.device))
        self.settings.reasons["tables"] = tiers.why
        self.model: DLRMv4 = make_model(replace(config, tables=tables), tiers, self.settings.device, seed=0)
        self.pass_per_item = not can_share(self.model)
        self.batch_size = config.evaluate.batch_size or config.train.batch_size
        # Parts are saved between blocks; at the speed of a large model on a CPU one takes about ten seconds.
        self.block_rows = 32 * self.batch_size

    @cached_property
    def windows(self) -> EventWindows:
        return EventWindows(self.config)

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        return Encoded(*self.row_queries.queries(rows))

    def logits(self, inputs: Queries) -> Tensor:
        batches = (inputs[first : first + self.batch_size] for first in range(0, len(inputs), self.batch_size))
        logits = []
        for batch in prepared_on_host(batches, self.histories.queried):
            poll()
            logits.append(self.model(self._inputs(batch)))
        return torch.cat(logits).cpu()

    def rank(self, users: Any) -> Tensor:
        """Scores every item for users as of now, with all events of the store as history."""
        return self._ranked(users, self.items.numbers_V)

    def rank_items(self, user: Any, items_N: NDArray[np.int64]) -> Tensor:
        return self._ranked(user, self.items.numbers_V[items_N])[0]

    def _ranked(self, users: Any, items_I: NDArray[np.int64]) -> Tensor:
        users_U = self.users.indices(users)
        queries = self.row_queries.at(np.repeat(users_U, len(items_I)), np.tile(items_I, len(users_U)), None)
        logits_P = candidate_logits(self.model, self._inputs, self.histories, queries, self.batch_size)
        return logits_P.view(len(users_U), len(items_I))

    def _inputs(self, batch: HistoryBatch) -> Inputs:
        return prepare(batch.to(self.settings.device), self.config.model)

    def export(self, example: Table, inputs: Queries) -> Export:
        batch = self.histories.queried(inputs)
        # Without the tables, of which a GPU may not hold a second copy.
        program = copy.deepcopy(PaddedDLRMv4(self.model)).cpu()
        return Export(
            tables=self._tables(),
            program=program,
            inputs=padded_inputs(self.model, batch.to(self.settings.device)),
            meanings=MEANINGS,
            example=example,
            logits_B=self.logits(inputs),
            more={"catalogue": self._catalogue()},
        )

    def _tables(self) -> list[TableExport]:
        """Tables of users, items, artists and albums by own id, where the store has these; others by row."""
        arrow, tables = pyarrow(), []
        # Users that were taken over from earlier data have no events, but rows.
        listed = self.store.originals.get("users")
        users = np.arange(1, listed.lines + 1) if listed else self.store.user_ids_U.astype(np.int64)
        own = {
            "uid": (arrow.array(self._own_ids("user", users)), users),
            "item_id": (self.items.values, self.items.numbers_V),
        }
        for role, column in (("artist", 0), ("album", 1)):
            numbers = np.unique(self.store.catalogue_I2[self.items.numbers_V, column]).astype(np.int64)
            own[f"{role}_id"] = arrow.array(self._own_ids(role, numbers)), numbers
        for name, rows in self.config.model.table_rows.items():
            weight = self.model.tables.table(name)
            if name in own:
                ids, numbers = own[name]
                none = arrow.array([None], ids.type)
                ids, rows_I = arrow.concat_arrays([none, ids]), np.concatenate([[0], numbers % rows])
                meaning = f"embeddings of {name} by {BY_ID}"
                tables.append(TableExport(name=name, weight_RW=weight, ids=ids, rows_I=rows_I, meaning=meaning))
            else:
                parts, space = CROSSES[name]
                meaning = (
                    f"embeddings of {' with '.join(parts)}: row (xxh64 of the numbers as 64-bit words) % {space} % "
                    f"{rows}; numbers of items, artists and albums are in catalogue.parquet, hour is that of the time"
                )
                tables.append(TableExport(name=name, weight_RW=weight, meaning=meaning))
        return tables

    def _own_ids(self, role: str, numbers: NDArray[np.int64]) -> list[int | str]:
        """Own ids of users, artists or albums."""
        if f"{role}s" not in self.store.originals:
            return numbers.tolist()  # type: ignore[no-any-return]
        listed = originals(self.store.folder, f"{role}s")
        text = any(isinstance(one, str) for one in listed)
        return [listed[number - 1] if 0 < number <= len(listed) else "" if text else 0 for number in numbers]

    def _catalogue(self) -> Table:
        """Own id, number, artist and album of every item, the latter as numbers."""
        numbers = self.items.numbers_V
        artists, albums = self.store.catalogue_I2[numbers].T
        return pyarrow().table({"item": self.items.values, "number": numbers, "artist": artists, "album": albums})

    def held_out(self, seed: int) -> Iterator[tuple[Table, Queries]]:
        order = self.windows.valid_order(self.windows.part_at(None))
        together = self.block_rows // self.batch_size
        for first in range(0, len(order), together):
            numbers = range(first, min(first + together, len(order)))
            positions_N = np.concatenate([order.batch(number) for number in numbers])
            kinds_N = self.store.kinds(positions_N)
            queries = self.histories.events(positions_N, kinds_N)
            names = {role: self.row_queries.spellings(role)[0] for role in ("user", "item", "time")}
            rows = {
                names["user"]: self.users.of_numbers(queries.users_B),
                names["item"]: self.items.of_numbers(queries.items_B),
                **({names["time"]: self.row_queries.own_times(queries.times_B)} if self.optional else {}),
                free_name("label", names.values()): ((kinds_N & LISTEN_PLUS) > 0).astype(np.int8),
            }
            yield pyarrow().table(rows), queries

    def meeting(self) -> tuple[Tensor, str] | None:
        """The probability that a user meets each item right after the last event, and its description."""
        shares = self.windows.shares()
        if shares is None:
            return None
        items_I = torch.from_numpy(self.items.numbers_V)
        shares = replace(shares, catalogue=len(items_I))
        return shares(items_I, torch.full_like(items_I, self.row_queries.now + 1)), recent(self.store, shares)

    def item_events(self) -> NDArray[np.int64]:
        happened = (self.store.kinds(slice(None)) & DRAWN) == 0
        counts_I = np.bincount(self.store.items_at(slice(None))[happened], minlength=self.store.items)
        return counts_I[self.items.numbers_V]

    def seen(self, user: int) -> Tensor:
        first, stop = self.store.user_first_U1[user : user + 2].tolist()
        happened = (self.store.kinds(slice(first, stop)) & DRAWN) == 0
        items = np.unique(self.store.items_at(slice(first, stop))[happened])
        return torch.from_numpy(np.searchsorted(self.items.numbers_V, items))
