"""A trained dlrm-v4: scores items for users by the histories in the event store.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.rows import Ids, Table, pyarrow
from ...data.yambda.history import Histories
from ...data.yambda.moments import Moments
from ...data.yambda.queries import Queries
from ...data.yambda.rates import RunningRates
from ...data.yambda.schema import DRAWN, LISTEN_PLUS
from ...execution.serving import Encoded, Served
from ...models.dlrm_v4.inputs import prepare
from ...models.dlrm_v4.model import DLRMv4
from ...stop import poll
from ...train.prefetch import prepared_on_host
from .build import settings_of
from .config import DLRMv4WorkloadConfig
from .data import EventWindows, opened


class ServedHistories(Served):
    """Rows have a user and an item, and maybe a time."""

    users: Ids
    items: Ids

    def __init__(self, config: DLRMv4WorkloadConfig) -> None:
        self.config = config
        self.settings = settings_of(config)
        self.store = opened(config.data)
        self.moments = Moments(self.store)
        self.users, self.items = self.moments.users, self.moments.items
        self.roles = {role: self.moments.spellings(role) for role in ("user", "item")}
        self.optional = {"time": self.moments.spellings("time")}
        rates = RunningRates(self.store) if config.model.rates_hidden else None
        pin = self.settings.device.type == "cuda"
        self.histories = Histories(self.store, config.data.history, pin=pin, rates=rates)
        self.model: DLRMv4 = DLRMv4(config.model, device=self.settings.device)
        self.batch_size = config.evaluate.batch_size or config.train.batch_size
        # A part is saved after each block: at the speed of a large model on a CPU, about every ten seconds.
        self.block_rows = 32 * self.batch_size

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        return Encoded(*self.moments.queries(rows))

    def logits(self, inputs: Queries) -> Tensor:
        batches = (inputs[first : first + self.batch_size] for first in range(0, len(inputs), self.batch_size))
        logits = []
        for batch in prepared_on_host(batches, self.histories.queried):
            poll()
            logits.append(self.model(prepare(batch.to(self.settings.device), self.config.model)))
        return torch.cat(logits).cpu()

    def rank(self, users: Any) -> Tensor:
        """Of now: with all events of the store as history."""
        users_U, items_I = self.users.places(users), self.items.numbers_V
        queries = self.moments.at(np.repeat(users_U, len(items_I)), np.tile(items_I, len(users_U)), None)
        return self.logits(queries).view(len(users_U), len(items_I))

    def held_out(self, seed: int) -> Iterator[tuple[Table, Queries]]:
        windows = EventWindows(self.config)
        order = windows.valid_order(windows.windows_at(None))
        together = self.block_rows // self.batch_size
        for first in range(0, len(order), together):
            numbers = range(first, min(first + together, len(order)))
            positions_N = np.concatenate([order.batch(number) for number in numbers])
            kinds_N = self.store.kinds(positions_N)
            queries = self.histories.events(positions_N, kinds_N)
            rows = {
                "user": self.users.of_numbers(queries.users_B),
                "item": self.items.of_numbers(queries.items_B),
                "time": self.moments.own_times(queries.times_B),
                "label": ((kinds_N & LISTEN_PLUS) > 0).astype(np.int8),
            }
            names = {
                role: self.moments.spellings(role)[0] if role in ("user", "item", "time") else role for role in rows
            }
            yield pyarrow().table({names[role]: values for role, values in rows.items()}), queries

    def seen(self, user: int) -> Sequence[int]:
        first, stop = self.store.user_first_U1[user : user + 2].tolist()
        happened = (self.store.kinds(slice(first, stop)) & DRAWN) == 0
        items = np.unique(self.store.items_at(slice(first, stop))[happened])
        places: list[int] = np.searchsorted(self.items.numbers_V, items).tolist()
        return places
