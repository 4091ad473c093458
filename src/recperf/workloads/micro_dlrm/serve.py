"""A trained micro-dlrm: encodes pairs of user and item as the validation rows were.

Shapes: N rows, U users of the data, I items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.clicks import dense_features, split_rows
from ...data.rows import Ids, Rows, Table, Unknown, pyarrow
from ...execution.serving import Encoded, Served
from ...models.dlrm import DLRM
from ...train.device import Settings, choose
from ..click_candidates import part_of
from ..click_serve import Longs, ServedClicks, ServedImported
from ..clicks import largest_product
from .config import MicroDLRMConfig
from .data import check_sizes, imported, read


def serve(config: MicroDLRMConfig) -> Served:
    product = largest_product(config.model, config.train.batch_size)
    settings = choose(config.train, largest_product_flops=product)
    model = DLRM(config.model).to(settings.device)
    if config.data.has_clicks:
        return ServedImported(imported(config.data), model, settings)
    return ServedRatings(config, model, settings)


class ServedRatings(ServedClicks):
    """Users and items are given by their own ids. An id without training rows is looked up in row 0."""

    users: Ids
    items: Ids

    def __init__(self, config: MicroDLRMConfig, model: DLRM, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.ratings, self.clicks = read(config.data)
        self.data_digest = self.ratings.digest
        check_sizes(config.model, self.clicks)
        self.keys, self.slots = self.clicks.feature_names, (1,) * len(self.clicks.feature_names)
        self.dense_names = self.clicks.dense_names
        self.valid_N = split_rows(self.ratings, config.data)
        self.roles = {"user": ("user", "user_id", "userId"), "item": ("item", "item_id", "itemId", "movieId")}
        self.users, self.items = self._ids("user", self.ratings.user), self._ids("item", self.ratings.item)

    def _ids(self, role: str, numbers_N: Any) -> Ids:
        """Own ids of the users or items that have ratings."""
        numbers = np.unique(numbers_N)
        return Ids.of(role, numbers.tolist(), numbers)

    @cached_property
    def _trained(self) -> tuple[list[Any], Any, Any]:
        """Which ids of each sparse feature training rows have; each user's mean label and number of those rows."""
        data, training = self.ratings, ~self.valid_N
        known = []
        for ids, _ in data.id_features().values():
            known.append(np.zeros(int(ids.max()) + 1, np.bool_))
            known[-1][ids[training]] = True
        labels = data.liked[training]
        size = int(data.user.max()) + 1
        count_U = np.bincount(data.user[training], minlength=size)
        clicks_U = np.bincount(data.user[training], weights=labels, minlength=size)
        overall = labels.sum() / max(1, len(labels)) if len(labels) else 0.5
        return known, np.where(count_U > 0, clicks_U / np.maximum(count_U, 1), overall), count_U

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        looked_up = {"user": self.users.numbers(rows["user"]), "item": self.items.numbers(rows["item"])}
        numbers = {role: numbers_N for role, (numbers_N, _) in looked_up.items()}
        dense_ND = np.concatenate([self._by_id[role].dense_ND[numbers[role]] for role in numbers], axis=1)
        ids = [self._by_id[role].ids_NS[:, at][numbers[role]] for at, role in enumerate(self._role_of_key)]
        unknown = {role: Unknown.of(~known_N, rows[role]) for role, (_, known_N) in looked_up.items()}
        return Encoded(Rows(dense_ND, np.stack(ids, 1), np.zeros(len(dense_ND), np.uint8)), unknown)

    @cached_property
    def _by_id(self) -> dict[str, Rows]:
        """The dense features of every user and of every item by its number, and the table rows with the other unknown,
        which are 0 for features of the other."""
        users, items = (np.arange(int(ids.numbers_V.max()) + 1) for ids in (self.users, self.items))
        of_user = self.dense_names.index("user count") + 1
        user, item = self._of_pairs(users, np.zeros_like(users)), self._of_pairs(np.zeros_like(items), items)
        return {
            "user": Rows(np.ascontiguousarray(user.dense_ND[:, :of_user]), user.ids_NS, user.labels_N),
            "item": Rows(np.ascontiguousarray(item.dense_ND[:, of_user:]), item.ids_NS, item.labels_N),
        }

    @cached_property
    def _role_of_key(self) -> list[str]:
        """Of which, user or item, each sparse feature is."""
        return ["user" if self._by_id["user"].ids_NS[:, at].any() else "item" for at in range(len(self.keys))]

    def _of_pairs(self, users_N: Longs, items_N: Longs) -> Rows:
        known, mean_U, count_U = self._trained
        data = replace(self.ratings, user=users_N, item=items_N)
        features = dense_features(data, mean_U[users_N], count_U[users_N])
        ids = [np.where(trained[ids], ids, 0) for trained, (ids, _) in zip(known, data.id_features().values())]
        dense_ND = np.stack(list(features.values()), axis=1).astype(np.float32)
        return Rows(dense_ND, np.stack(ids, 1).astype(np.int32), np.zeros(len(users_N), np.uint8))

    def held_out(self, seed: int) -> Iterator[tuple[Table, Rows]]:
        data, valid = self.ratings, self.clicks.valid
        rows = pyarrow().table({
            "user": self.users.of_numbers(data.user[self.valid_N]),
            "item": self.items.of_numbers(data.item[self.valid_N]),
            "time": data.timestamp[self.valid_N],
            "label": valid.labels.astype(np.int8),
        })  # fmt: skip
        inputs = Rows(valid.dense, valid.ids.T.astype(np.int32), valid.labels.astype(np.uint8))
        for first, last in self.blocks(len(rows)):
            yield rows.slice(first, last - first), part_of(inputs, first, last)

    @cached_property
    def train_places(self) -> tuple[Tensor, Tensor]:
        users_N, items_N = (
            torch.from_numpy(np.searchsorted(ids.numbers_V, numbers_N[~self.valid_N]))
            for ids, numbers_N in ((self.users, self.ratings.user), (self.items, self.ratings.item))
        )
        return users_N, items_N

    def own_ids(self, feature: str) -> tuple[Any, Any] | None:
        """Ids that training rows have, and none for row 0."""
        ids = {"user": self.users, "item": self.items}.get(feature)
        if ids is None:
            return None
        arrow, known = pyarrow(), self._trained[0][self.keys.index(feature)]
        trained = np.flatnonzero(known[ids.numbers_V])
        values = ids.values.take(arrow.array(trained))
        none = arrow.array([None], values.type)
        return arrow.concat_arrays([none, values]), np.concatenate([[0], ids.numbers_V[trained]])

    def more_tables(self) -> dict[str, Table]:
        """The dense features and further table rows of all users and items."""
        arrow, tables = pyarrow(), {}
        for role, ids in (("user", self.users), ("item", self.items)):
            of_role = self._by_id[role].take(ids.numbers_V)
            first = 0 if role == "user" else self._by_id["user"].dense_ND.shape[1]
            dense = dict(zip(self.dense_names[first:], of_role.dense_ND.T))
            more = [at for at, key in enumerate(self.keys) if key != role and self._role_of_key[at] == role]
            rows = {f"row of {self.keys[at]}": of_role.ids_NS[:, at] for at in more}
            tables[f"{role}s"] = arrow.table({role: ids.values, **dense, **rows})
        return tables
