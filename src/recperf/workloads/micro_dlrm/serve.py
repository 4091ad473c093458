"""A trained micro-dlrm: encodes pairs of user and item as the validation rows were.

Shapes: N rows, U users of the data, I items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.clicks import Clicks, dense_features, split_rows
from ...data.order import Samples, cut
from ...data.ratings import Ratings
from ...data.rows import Ids, Table, pyarrow
from ...execution.serving import Encoded, Served
from ...models.dlrm import DLRM
from ...stop import poll
from ...train.device import choose
from ..clicks import SCORING_BATCH, largest_product
from .config import MicroDLRMConfig
from .data import check_sizes, read


class ServedRatings(Served):
    """Users and items are given by their own ids. An id without training rows is looked up in row 0."""

    batch_size = SCORING_BATCH
    users: Ids
    items: Ids

    def __init__(self, config: MicroDLRMConfig) -> None:
        self.config = config
        product = largest_product(config.model, config.train.batch_size)
        self.settings = choose(config.train, largest_product_flops=product)
        self.model: DLRM = DLRM(config.model).to(self.settings.device)
        self.ratings, self.clicks = self._read()
        self.valid_N = split_rows(self.ratings, config.data)
        self.roles = {"user": ("user", "user_id", "userId"), "item": ("item", "item_id", "itemId", "movieId")}
        self.users, self.items = self._ids("user", self.ratings.user), self._ids("item", self.ratings.item)

    def _ids(self, role: str, numbers_N: Any) -> Ids:
        """Own ids of the users or items that have ratings."""
        numbers, own = np.unique(numbers_N), self.ratings.own_ids
        return Ids.of(role, [own[role][number - 1] for number in numbers] if own else numbers.tolist(), numbers)

    def _read(self) -> tuple[Ratings, Clicks]:
        ratings, clicks = read(self.config.data)
        check_sizes(self.config.model, clicks)
        return ratings, clicks

    @cached_property
    def _trained(self) -> tuple[list[Any], Any, Any]:
        """Which ids of each sparse feature training rows have; each user's mean label and number of those rows."""
        data, training = self.ratings, ~self.valid_N
        known = []
        for ids, _ in data.id_features().values():
            known.append(np.zeros(int(ids.max()) + 1, np.bool_))
            known[-1][ids[training]] = True
        labels = (data.rating >= data.liked_from)[training]
        size = int(data.user.max()) + 1
        count_U = np.bincount(data.user[training], minlength=size)
        clicks_U = np.bincount(data.user[training], weights=labels, minlength=size)
        overall = labels.sum() / max(1, len(labels)) if len(labels) else 0.5
        return known, np.where(count_U > 0, clicks_U / np.maximum(count_U, 1), overall), count_U

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        (users_N, _), (items_N, _) = self.users.numbers(rows["user"]), self.items.numbers(rows["item"])
        known, mean_U, count_U = self._trained
        data = self.ratings.for_pairs(users_N, items_N)
        features = dense_features(data, mean_U[users_N], count_U[users_N])
        ids = [np.where(trained[ids], ids, 0) for trained, (ids, _) in zip(known, data.id_features().values())]
        keys = self.clicks.feature_names
        samples = Samples(
            keys=keys,
            dense_ND=torch.from_numpy(np.stack(list(features.values()), axis=1).astype(np.float32)),
            ids_FN=torch.from_numpy(np.stack(ids)),
            labels_N=torch.zeros(len(users_N)),
        )
        unknown = {role: int((ids[keys.index(role)] == 0).sum()) for role in self.roles}
        return Encoded(samples.to(self.settings.device), unknown)

    def logits(self, inputs: Samples) -> Tensor:
        logits = []
        for batch in cut(inputs, SCORING_BATCH):
            poll()
            logits.append(self.model(batch.dense_BD, batch.features))
        return torch.cat(logits).cpu()

    def held_out(self, seed: int) -> Iterator[tuple[Table, Samples]]:
        arrow, data, valid = pyarrow(), self.ratings, self.clicks.valid
        rows = arrow.table({
            "user": self.users.of_numbers(data.user[self.valid_N]),
            "item": self.items.of_numbers(data.item[self.valid_N]),
            "time": data.timestamp[self.valid_N],
            "label": valid.labels.astype(np.int8),
        })  # fmt: skip
        size = self.block_rows // SCORING_BATCH * SCORING_BATCH
        for first in range(0, len(rows), size):
            here = slice(first, first + size)
            samples = Samples(
                keys=self.clicks.feature_names,
                dense_ND=torch.from_numpy(valid.dense[here]),
                ids_FN=torch.from_numpy(valid.ids[:, here]),
                labels_N=torch.from_numpy(valid.labels[here]),
            )
            yield rows.slice(first, size), samples.to(self.settings.device)

    def seen(self, user: int) -> Sequence[int]:
        own = ~self.valid_N & (self.ratings.user == self.users.numbers_V[user])
        places: list[int] = np.searchsorted(self.items.numbers_V, np.unique(self.ratings.item[own])).tolist()
        return places
