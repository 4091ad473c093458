"""Trained click models: scoring of rows of MovieLens (micro-dlrm) and of imported clicks, and what an export has.

Shapes: N rows, B samples, F sparse features, D width, S slots of ids, U users of the data, I items.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.batch import ClickBatch
from ..data.order import ClickOrder
from ..data.rows.clicks import Clicks, dense_features
from ..data.rows.imported import ImportedClicks
from ..data.tables import EMPTY, Ids, MemoryRows, Rows, Split, Table, Unknown, pyarrow
from ..errors import UsageError
from ..execution.serving import BY_ID, Encoded, Export, Served, TableExport, free_name
from ..models.dlrm import DLRM, make_interaction
from ..models.embeddings import StackedTables
from ..models.streams import SideStreams
from ..models.tables import SparseTables
from ..models.tiers.config import TablesConfig, scored_only
from ..stop import poll
from ..train.device import Settings, choose
from ..train.ranking import grouped_items, log_shares
from .click_candidates import SHOWN, SPLITS, ItemColumns, add_rows
from .clicks import SCORING_BATCH, largest_product
from .dlrm.build import ConfiguredDLRM, readable
from .dlrm.config import DLRMWorkloadConfig
from .micro_dlrm.build import sparse_tables
from .micro_dlrm.config import MicroDLRMConfig, rows_of

Longs = NDArray[np.int64]


class DensePart(nn.Module):
    """A DLRM behind its tables, in plain torch."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.bottom, self.top = copy.deepcopy(model.bottom), copy.deepcopy(model.top)
        self.interaction = make_interaction(model.config)
        self.interaction.load_state_dict(model.interaction.state_dict())

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """The logits of B x dense features and B x F x D embeddings."""
        logits: Tensor = self.top(self.interaction(self.bottom(dense), list(embeddings.unbind(1)))).squeeze(1)
        return logits


class ServedClicks(Served):
    """Inputs are `Rows`: numbers and table rows on the host."""

    clicks: Any
    model: DLRM
    batch_size = SCORING_BATCH

    def __init__(self, clicks: Any, model: DLRM, settings: Settings) -> None:
        self.clicks, self.model, self.settings = clicks, model, settings
        self.keys, self.slots, self.dense_names = clicks.keys, clicks.slots, clicks.dense_names

    def logits(self, inputs: Rows) -> Tensor:
        rows, logits = MemoryRows(self.keys, self.slots, inputs), []
        for batch in ClickOrder(store=rows, batch_size=self.batch_size, seed=0, split="valid").cut():
            poll()
            batch = batch.to(self.settings.device)
            logits.append(self.logits_of(batch))
        return torch.cat(logits).cpu()

    def logits_of(self, batch: ClickBatch) -> Tensor:
        logits_B: Tensor = self.model(batch.dense_BD, batch.features)
        return logits_B

    def first(self, inputs: Rows, rows: int) -> Rows:
        return inputs.take(np.arange(min(rows, len(inputs))))

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Divide `rows` rows into blocks of whole batches, the last one shorter."""
        size = self.block_rows // self.batch_size * self.batch_size
        for first in range(0, rows, size):
            yield first, min(first + size, rows)

    @cached_property
    def train_places(self) -> tuple[Tensor, Tensor]:
        return self.places("train")

    def places(self, split: Split) -> tuple[Tensor, Tensor]:
        """The places in `users` and `items` of the user and the item of every row of a split; -1 for a missing one."""
        assert self.users is not None
        assert self.items is not None
        places = []
        for role, ids in (("user", self.users), ("item", self.items)):
            numbers_N, numbers_V = self.clicks.role_ids(role, split), ids.numbers_V
            assert numbers_N is not None
            places_N = np.searchsorted(numbers_V, numbers_N)
            places.append(torch.from_numpy(np.where(numbers_V[places_N] == numbers_N, places_N, -1)))
        return places[0], places[1]

    @property
    @abstractmethod
    def owned(self) -> tuple[ItemColumns, ItemColumns]:
        """The columns that belong to the user, and those that belong to the item, by their numbers."""

    def pairs(self, users_P: Longs, items_P: Longs) -> Rows:
        """Rows of users and items, whose columns are those of either; what belongs to neither is unknown."""
        user, item = self.owned
        unknown_S = torch.tensor([0 if slot == 0 else EMPTY for slots in self.slots for slot in range(slots)])
        columns = torch.zeros(len(users_P), len(self.dense_names)), unknown_S.expand(len(users_P), -1)
        columns = user.replaced(torch.from_numpy(users_P), *columns)
        dense_PD, ids_PS = item.replaced(torch.from_numpy(items_P), *columns)
        return Rows(dense_PD.numpy(), ids_PS.int().numpy(), np.zeros(len(users_P), np.uint8))

    def rank(self, users: Any) -> Tensor:
        assert self.users is not None
        assert self.items is not None
        users_U, items_I = self.users.numbers(users)[0], self.items.numbers_V
        rows = self.pairs(users_U.repeat(len(items_I)), np.tile(items_I, len(users_U)))
        return self.logits(rows).view(len(users_U), len(items_I))

    def meeting(self) -> tuple[Tensor, str] | None:
        assert self.items is not None
        items_N = self.train_places[1]
        return log_shares(torch.bincount(items_N[items_N >= 0], minlength=len(self.items))), SHOWN

    @cached_property
    def _items_of(self) -> Callable[[int], Tensor]:
        return grouped_items(*self.train_places)

    def seen(self, user: int) -> Tensor:
        items_N = self._items_of(user)
        return items_N[items_N >= 0]

    def own_ids(self, feature: str) -> tuple[Any, Any] | None:
        """Own ids of a sparse feature as an array of pyarrow, and the table row of each; None where it has none."""
        return None

    def export(self, example: Table, inputs: Rows) -> Export:
        embeddings = self.model.embeddings
        assert isinstance(embeddings, StackedTables | SparseTables)
        tables = []
        for feature in self.keys:
            own = self.own_ids(feature)
            by = self.by_row(feature) if own is None else BY_ID
            ids, rows = own or (None, None)
            meaning, weight = f"embeddings of {feature} by {by}", embeddings.table(feature)
            tables.append(TableExport(name=feature, weight_RW=weight, ids=ids, rows_I=rows, meaning=meaning))
        ids_NS = torch.from_numpy(inputs.ids_NS).long().to(self.settings.device)
        pooled = []
        for feature, ids_NL in zip(self.keys, torch.split(ids_NS, list(self.slots), 1)):
            rows_NLD = embeddings.table(feature)[ids_NL.clamp(min=0)]
            pooled.append((rows_NLD * (ids_NL != EMPTY).unsqueeze(2)).sum(1))
        return Export(
            tables=tables,
            program=DensePart(self.model),
            inputs={"dense": torch.from_numpy(inputs.dense_ND), "embeddings": torch.stack(pooled, 1)},
            meanings={
                "dense": f"dense features: {', '.join(self.dense_names)}",
                "embeddings": f"embeddings of {', '.join(self.keys)}; of several ids of one feature, their sum",
            },
            example=example,
            logits_B=self.logits(inputs),
            more=self.more_tables(),
            encoding=self.encoding(),
        )

    def by_row(self, feature: str) -> str:
        """How an embedding is found in the table of a feature without own ids."""
        return "row"

    def encoding(self) -> dict[str, Any]:
        """How a user's values become inputs."""
        return {}

    def more_tables(self) -> dict[str, Table]:
        """Further tables that dense features come from."""
        return {}


class CategoryIds(Ids):
    """Users or items of imported clicks, compared as in rows to be scored. Their role is the name of their column."""

    def __init__(self, clicks: ImportedClicks, column: str, values: Any) -> None:
        super().__init__(column, values)
        self.clicks = clicks

    def indices(self, column: Any) -> Longs:
        return self.clicks.indices(self.role, column)


class ServedImported(ServedClicks):
    """Clicks of a user's own columns; a category that no training row has is looked up in row 0."""

    clicks: ImportedClicks

    def __init__(self, clicks: ImportedClicks, model: DLRM, settings: Settings) -> None:
        super().__init__(clicks, model, settings)
        self.data_digest = clicks.digest
        self.roles = {one.name: (one.name,) for one in clicks.manifest.columns}
        self.users, self.items = self._ids("user"), self._ids("item")
        self.titles = self._titles()

    def _titles(self) -> list[str | None] | None:
        table = None if self.items is None else self.clicks.titles()
        if self.items is None or table is None:
            return None
        titles: list[str | None] = [None] * len(self.items)
        for place, title in zip(self.items.indices(table["id"]).tolist(), table["title"].to_pylist()):
            if place >= 0:
                titles[place] = title
        return titles

    def _vocabulary(self, key: str) -> Any:
        return self.clicks.columns.sparse[self.keys.index(key)][1].values

    def _ids(self, role: str) -> Ids | None:
        column = getattr(self.clicks.manifest, role)
        values = None if column not in self.keys else self._vocabulary(column)
        return None if values is None else CategoryIds(self.clicks, column, values)

    def known(self) -> set[str]:
        if self.users is None or self.items is None:
            return set()
        return self.roles.keys() - set(self._of_neither()) - {self.users.role, self.items.role}

    def _of_neither(self) -> list[str]:
        """Columns that belong neither to the user nor to the item."""
        user, item = self.owned
        owned = torch.cat([user.by_item_D | item.by_item_D, user.by_item_S | item.by_item_S]).tolist()
        names = [*self.dense_names, *(key for key, slots in zip(self.keys, self.slots) for _ in range(slots))]
        return list(dict.fromkeys(name for name, is_owned in zip(names, owned) if not is_owned))

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        """Columns that rows do not have are those of their users and items in the data."""
        arrow, missing = pyarrow(), self.roles.keys() - rows.keys()
        count = len(next(iter(rows.values())))
        none = {name: arrow.nulls(count, arrow.string()) for name in missing}
        inputs, unknown = self.clicks.encode(arrow.table({**rows, **none}))
        if missing:
            columns = torch.from_numpy(inputs.dense_ND), torch.from_numpy(inputs.ids_NS).long()
            for ids, owned in zip((self.users, self.items), self.owned):
                assert ids is not None
                columns = owned.replaced(torch.from_numpy(ids.numbers(rows[ids.role])[0]), *columns)
            dense_ND, ids_NS = (column.numpy() for column in columns)
            at_D = [name.removesuffix(" missing") in missing for name in self.dense_names]
            at_S = np.repeat([key in missing for key in self.keys], self.slots)
            inputs = Rows(
                np.where(at_D, dense_ND, inputs.dense_ND), np.where(at_S, ids_NS, inputs.ids_NS).astype(np.int32),
                inputs.labels_N,
            )  # fmt: skip
        return Encoded(inputs, {name: one for name, one in unknown.items() if name not in missing})

    def held_out(self, seed: int) -> Iterator[tuple[Table, Rows]]:
        for first, last in self.blocks(self.clicks.count("valid")):
            rows = self.clicks.rows_of("valid", first, last)
            own = self.clicks.own_columns("valid", first, last)
            yield pyarrow().table({**own, free_name("label", self.names()): rows.labels_N}), rows

    @cached_property
    def owned(self) -> tuple[ItemColumns, ItemColumns]:
        """As the rows have them; the training rows decide which columns belong to whom."""
        assert self.users is not None
        assert self.items is not None
        sizes = len(self.users) + 1, len(self.items) + 1
        both = tuple(ItemColumns(size, len(self.dense_names), sum(self.slots)) for size in sizes)
        decided = []
        for split in SPLITS:
            places = self.places(split)
            add_rows(self.clicks, split, *((places_N + 1, one) for places_N, one in zip(places, both)))
            decided.append([(one.by_item_D.clone(), one.by_item_S.clone()) for one in both])
        for one, (by_item_D, by_item_S) in zip(both, decided[0]):
            one.by_item_D, one.by_item_S = by_item_D, by_item_S
        return both[0], both[1]

    def why_no_ranking(self) -> str | None:
        if self.users is None or self.items is None:
            return super().why_no_ranking()
        others = self._of_neither()
        return f"these columns belong neither to the user nor to the item: {', '.join(others[:5])}" if others else None

    def own_ids(self, feature: str) -> tuple[Any, Any] | None:
        """Categories that enough training rows have; null for those of row 0 and for the missing one of row 1."""
        if self._vocabulary(feature) is None:
            return None
        names = self.clicks.categories(feature)
        return pyarrow().array(names, pyarrow().string()), np.arange(len(names))

    def by_row(self, feature: str) -> str:
        return self.clicks.hashed_row(feature)

    def encoding(self) -> dict[str, Any]:
        return self.clicks.encoding()


def serve_micro_dlrm(config: MicroDLRMConfig) -> Served:
    product = largest_product(config.model, config.train.batch_size)
    settings = choose(config.train, largest_product_flops=product)
    model = DLRM(config.model, embeddings=sparse_tables(config, settings.device)).to(settings.device)
    clicks = rows_of(config)
    if isinstance(clicks, Clicks):
        return ServedRatings(clicks, model, settings)
    return ServedImported(clicks, model, settings)


class ServedRatings(ServedClicks):
    """Users and items are given by their own ids. An id without training rows is looked up in row 0."""

    clicks: Clicks
    users: Ids
    items: Ids

    def __init__(self, clicks: Clicks, model: DLRM, settings: Settings) -> None:
        super().__init__(clicks, model, settings)
        self.ratings, self.data_digest = clicks.ratings, clicks.ratings.digest
        self.data_features = list(clicks.dense_names)
        self.roles = {"user": ("user", "user_id", "userId"), "item": ("item", "item_id", "itemId", "movieId")}
        self.users, self.items = self._ids("user", self.ratings.user), self._ids("item", self.ratings.item)

    def _ids(self, role: str, numbers_N: Any) -> Ids:
        """Own ids of the users or items that have ratings."""
        numbers = np.unique(numbers_N)
        return Ids.of(role, numbers.tolist(), numbers)

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        looked_up = {"user": self.users.numbers(rows["user"]), "item": self.items.numbers(rows["item"])}
        unknown = {role: Unknown.of(~known_N, rows[role]) for role, (_, known_N) in looked_up.items()}
        return Encoded(self.pairs(looked_up["user"][0], looked_up["item"][0]), unknown)

    def pairs(self, users_P: Longs, items_P: Longs) -> Rows:
        """All users and items have features, and 0 in the columns of the other: sums are three times as fast."""
        places = torch.from_numpy(users_P), torch.from_numpy(items_P)
        dense = [columns.dense_ID.index_select(0, at) for columns, at in zip(self.owned, places)]
        ids = [columns.ids_IS.int().index_select(0, at) for columns, at in zip(self.owned, places)]
        return Rows(dense[0].add_(dense[1]).numpy(), ids[0].add_(ids[1]).numpy(), np.zeros(len(users_P), np.uint8))

    def _trained(self, feature: str) -> Longs:
        """The ids of a sparse feature that training rows have, and 0 for the others."""
        return np.unique(self.clicks.rows.ids_NS[:, self.keys.index(feature)])

    @cached_property
    def owned(self) -> tuple[ItemColumns, ItemColumns]:
        users, items = (np.arange(int(ids.numbers_V.max()) + 1) for ids in (self.users, self.items))
        of_user = np.arange(len(self.dense_names)) <= self.dense_names.index("user count")
        pairs = (users, np.zeros_like(users), of_user), (np.zeros_like(items), items, ~of_user)
        return self._columns(*pairs[0]), self._columns(*pairs[1])

    def _columns(self, users_N: Longs, items_N: Longs, own_D: NDArray[np.bool_]) -> ItemColumns:
        """The features of all users, or of all items, while the other is unknown."""
        data, train = self.ratings, self.clicks.index["train"]
        count_U, count_I = (np.bincount(ids[train], minlength=int(ids.max()) + 1) for ids in (data.user, data.item))
        data = replace(data, user=users_N, item=items_N)
        dense_ND = np.stack(list(dense_features(data, count_U[users_N], count_I[items_N]).values()), 1)
        sparse = data.id_features().items()
        ids_NS = np.stack([np.where(np.isin(ids, self._trained(key)), ids, 0) for key, (ids, _) in sparse], 1)
        columns = ItemColumns(len(users_N), len(own_D), len(self.keys))
        columns.add(torch.arange(len(users_N)), torch.from_numpy(dense_ND * own_D).float(), torch.from_numpy(ids_NS))
        columns.by_item_D, columns.by_item_S = torch.from_numpy(own_D), torch.from_numpy(ids_NS.any(0))
        return columns

    def held_out(self, seed: int) -> Iterator[tuple[Table, Rows]]:
        clicks = self.clicks
        rows = pyarrow().table({
            "user": self.users.of_numbers(clicks.role_ids("user", "valid")),
            "item": self.items.of_numbers(clicks.role_ids("item", "valid")),
            "time": clicks.times("valid"),
            "label": clicks.labels("valid").astype(np.int8),
        })  # fmt: skip
        for first, last in self.blocks(len(rows)):
            yield rows.slice(first, last - first), clicks.rows_of("valid", first, last)

    def own_ids(self, feature: str) -> tuple[Any, Any] | None:
        """Ids that training rows have, and none for row 0."""
        ids = {"user": self.users, "item": self.items}.get(feature)
        if ids is None:
            return None
        arrow, trained = pyarrow(), np.flatnonzero(np.isin(ids.numbers_V, self._trained(feature)))
        values = ids.values.take(arrow.array(trained))
        none = arrow.array([None], values.type)
        return arrow.concat_arrays([none, values]), np.concatenate([[0], ids.numbers_V[trained]])

    def more_tables(self) -> dict[str, Table]:
        """The dense features and further table rows of all users and items."""
        tables = {}
        for role, ids, columns in zip(("user", "item"), (self.users, self.items), self.owned):
            dense = dict(zip(self.dense_names, columns.dense_ID[ids.numbers_V].T.numpy()))
            rows = dict(zip(self.keys, columns.ids_IS[ids.numbers_V].int().T.numpy()))
            own = {name: dense[name] for name, owned in zip(dense, columns.by_item_D) if owned}
            more = {f"row of {key}": rows[key] for key, owned in zip(rows, columns.by_item_S) if owned and key != role}
            tables[f"{role}s"] = pyarrow().table({role: ids.values, **own, **more})
        return tables


def serve_dlrm(config: DLRMWorkloadConfig) -> Served:
    if config.data.source == "random":
        raise UsageError("this run was trained on random batches: there are no rows to score", fix="recperf show")
    # Neither a captured step nor where batches are drawn matters without training; tables lie where they fit now.
    fast, tables = replace(config.fast, graph="off", input="auto"), TablesConfig(folder=config.tables.folder)
    configured = ConfiguredDLRM(replace(config, fast=fast, tables=tables))
    configured.tiers = scored_only(configured.tiers)
    return ServedImported(readable(config), configured.make_model(0, SideStreams(enabled=False)), configured.settings)
