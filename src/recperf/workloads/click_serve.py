"""What trained click models (micro-dlrm, dlrm) share: scoring of rows, imported clicks, and what an export has.

Shapes: N rows, B samples, F sparse features, D width, S slots of ids.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.click_store.imported import ImportedClicks
from ..data.order import ClickOrder
from ..data.rows import EMPTY, Ids, Rows, Table, pyarrow
from ..execution.serving import BY_ID, Encoded, Export, Served, TableExport, free_name
from ..models.dlrm import DLRM, make_interaction
from ..models.embeddings import StackedTables
from ..models.tables import SparseTables
from ..stop import poll
from ..train.device import Settings
from ..train.ranking import grouped_items, log_shares
from .click_candidates import SHOWN, ItemColumns, MemoryRows, add_training_rows, part_of
from .clicks import SCORING_BATCH

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

    model: DLRM
    batch_size = SCORING_BATCH
    keys: tuple[str, ...]
    slots: tuple[int, ...]
    dense_names: tuple[str, ...]

    def logits(self, inputs: Rows) -> Tensor:
        rows, logits = MemoryRows(self.keys, self.slots, inputs), []
        for batch in ClickOrder(store=rows, batch_size=self.batch_size, seed=0, split="valid").cut():
            poll()
            batch = batch.to(self.settings.device)
            logits.append(self.model(batch.dense_BD, batch.features))
        return torch.cat(logits).cpu()

    def first(self, inputs: Rows, rows: int) -> Rows:
        return part_of(inputs, 0, rows)

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Whole batches of so many rows, the last one shorter."""
        size = self.block_rows // self.batch_size * self.batch_size
        for first in range(0, rows, size):
            yield first, min(first + size, rows)

    @property
    def train_places(self) -> tuple[Tensor, Tensor]:
        """The places in `users` and `items` of the user and the item of every training row; -1 for a missing one."""
        raise NotImplementedError

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

    def places(self, column: Any) -> Longs:
        return self.clicks.places(self.role, column)


class ServedImported(ServedClicks):
    """Clicks of a user's own columns; a category that no training row has is looked up in row 0."""

    def __init__(self, clicks: ImportedClicks, model: DLRM, settings: Settings) -> None:
        self.clicks, self.model, self.settings = clicks, model, settings
        self.data_digest = clicks.manifest.digest
        self.keys, self.slots, self.dense_names = clicks.keys, clicks.slots, clicks.dense_names
        self.roles = {one.name: (one.name,) for one in clicks.manifest.columns}
        self.users, self.items = self._ids("user"), self._ids("item")

    def _vocabulary(self, key: str) -> Any:
        return self.clicks.columns.sparse[self.keys.index(key)][1].values

    def _ids(self, role: str) -> Ids | None:
        column = getattr(self.clicks.manifest, role)
        values = None if column not in self.keys else self._vocabulary(column)
        return None if values is None else CategoryIds(self.clicks, column, values)

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        return Encoded(*self.clicks.encode(pyarrow().table(dict(rows))))

    def held_out(self, seed: int) -> Iterator[tuple[Table, Rows]]:
        for first, last in self.blocks(self.clicks.count("valid")):
            rows = self.clicks.rows_of("valid", first, last)
            own = self.clicks.own_columns("valid", first, last)
            yield pyarrow().table({**own, free_name("label", self.names()): rows.labels_N}), rows

    @cached_property
    def train_places(self) -> tuple[Tensor, Tensor]:
        users_N, items_N = (self.clicks.role_ids(role, "train") for role in ("user", "item"))
        assert users_N is not None
        assert items_N is not None
        return torch.from_numpy(users_N) - 1, torch.from_numpy(items_N) - 1

    @cached_property
    def _owned(self) -> tuple[ItemColumns, ItemColumns]:
        """The columns that belong to the user, and those that belong to the item."""
        assert self.users is not None
        assert self.items is not None
        sizes = len(self.users) + 1, len(self.items) + 1
        user, item = (ItemColumns(size, len(self.dense_names), sum(self.slots)) for size in sizes)
        users_N, items_N = self.train_places
        add_training_rows(self.clicks, (users_N + 1, user), (items_N + 1, item))
        return user, item

    def why_no_ranking(self) -> str | None:
        if self.users is None or self.items is None:
            return super().why_no_ranking()
        user, item = self._owned
        owned = torch.cat([user.by_item_D | item.by_item_D, user.by_item_S | item.by_item_S]).tolist()
        names = [*self.dense_names, *(key for key, slots in zip(self.keys, self.slots) for _ in range(slots))]
        others = list(dict.fromkeys(name for name, is_owned in zip(names, owned) if not is_owned))
        if not others:
            return None
        return f"these columns belong neither to the user nor to the item: {', '.join(others[:5])}"

    def rank(self, users: Any) -> Tensor:
        """Of rows whose other columns are those of the user and of the item in the training rows; what no training row
        says is unknown."""
        assert self.users is not None
        assert self.items is not None
        users_U, items_I = torch.from_numpy(self.users.places(users) + 1), torch.arange(1, len(self.items) + 1)
        users_P, items_P = users_U.repeat_interleave(len(items_I)), items_I.repeat(len(users_U))
        user, item = self._owned
        unknown_S = torch.tensor([0 if slot == 0 else EMPTY for slots in self.slots for slot in range(slots)])
        dense_PD, ids_PS = torch.zeros(len(users_P), len(self.dense_names)), unknown_S.expand(len(users_P), -1)
        dense_PD, ids_PS = item.replaced(items_P, *user.replaced(users_P, dense_PD, ids_PS))
        rows = Rows(dense_PD.numpy(), ids_PS.int().numpy(), np.zeros(len(users_P), np.uint8))
        return self.logits(rows).view(len(users_U), len(items_I))

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
