"""Embedding tables behind one signature, `forward(features) -> {key: pooled rows}`, and the plain ones.

Shapes: B samples, F features, D width, V ids in the batch, R rows of all tables, U distinct
rows of a batch.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.batch import JaggedFeatures, largest_ids
from ..errors import DataError
from ..ops.bag import native, reference
from .init import normal_
from .mlp import add_gradient

if TYPE_CHECKING:
    from .tiers.slots import Placed


class Embeddings(nn.Module, ABC):
    """The interface between a model and its embeddings, whichever implementation it holds."""

    frozen = False
    """Tables that are buffers have no parameter that says so: set by `requires_grad_`."""

    def requires_grad_(self, requires_grad: bool = True) -> Embeddings:
        """Freeze or train the tables, those that are buffers too."""
        super().requires_grad_(requires_grad)
        self.frozen = not requires_grad
        return self

    def forget(self) -> None:
        """Drop the gradients that `backward` stored outside parameters."""

    @abstractmethod
    def reset(self, std: float, seed: int) -> None:
        """Draw the initial rows."""

    @abstractmethod
    def check(self, features: JaggedFeatures) -> None:
        """Raise an error for ids that cannot be looked up."""

    @abstractmethod
    def record(self, features: JaggedFeatures) -> tuple[Tensor, Any]:
        """Return the pooled rows, F x B x D, and what `backward` needs."""

    @abstractmethod
    def backward(self, saved: Any, features: JaggedFeatures, gradient_FBD: Tensor) -> None:
        """Store the gradient where the optimizer of these tables reads it."""


@dataclass(frozen=True, eq=False)
class PlacedFeatures(JaggedFeatures):
    """Features of a batch whose rows are in the cache; the values are places among its distinct rows, ascending."""

    rows_U: Tensor = field(kw_only=True)
    slots_U: Tensor = field(kw_only=True)
    placed: Placed = field(kw_only=True)

    def slice(self, start: int, stop: int) -> PlacedFeatures:
        part = super().slice(start, stop)
        return replace(self, values_V=part.values_V, offsets_FB1=part.offsets_FB1)


class StackedTables(Embeddings):
    """Tables of one width stacked in one parameter, so that one call looks up all features on any device.

    Ids of a bag are summed. Row 0 of a table serves ids never seen in training and starts at zero.
    """

    def __init__(self, keys: tuple[str, ...], rows: tuple[int, ...], dim: int) -> None:
        super().__init__()
        if len(rows) != len(keys):
            raise ValueError(f"{len(keys)} tables need as many row counts, not {len(rows)}")
        self.keys = keys
        self.rows = rows
        self.weight_RD = nn.Parameter(torch.empty(sum(rows), dim))
        self.starts = tuple(sum(rows[:index]) for index in range(len(rows)))
        self.register_buffer("starts_F1", torch.tensor(self.starts)[:, None], persistent=False)
        self.starts_F1: Tensor

    def table(self, key: str) -> Tensor:
        """The rows of one table, a view."""
        index = self.keys.index(key)
        return self.weight_RD.detach()[self.starts[index] : self.starts[index] + self.rows[index]]

    def reset(self, std: float, seed: int) -> None:
        for key in self.keys:
            table = self.table(key)
            normal_(table, std, seed, f"table.{key}")
            table[0].zero_()

    def check(self, features: JaggedFeatures) -> None:
        require_ids(features, self.keys, self.rows)

    def forward(self, features: JaggedFeatures) -> dict[str, Tensor]:
        pooled_FBD = pool(self.rows_of(features), self.weight_RD, features)
        return dict(zip(self.keys, pooled_FBD.unbind(0)))

    def record(self, features: JaggedFeatures) -> tuple[Tensor, Tensor]:
        rows_V = self.rows_of(features)
        return pool(rows_V, self.weight_RD, features), rows_V

    def backward(self, saved: Tensor, features: JaggedFeatures, gradient_FBD: Tensor) -> None:
        if self.weight_RD.requires_grad:
            add_gradient(self.weight_RD, pool_backward(saved, gradient_FBD, features, self.weight_RD.shape[0]))

    def rows_of(self, features: JaggedFeatures) -> Tensor:
        """The row of the stacked tensor that each id refers to. On a CPU an id outside its table is an error; on a GPU
        the check would wait for the device, and `check` makes it."""
        require_keys(features, self.keys)
        if not features.one_id_a_bag:
            rows: Any = native if features.values_V.is_cpu and not isinstance(native.library(), str) else reference
            rows_V: Tensor = rows.checked_rows(
                features.values_V, features.offsets_FB1, sum(self.rows), self.starts_F1[:, 0]
            )
            return rows_V
        ids_FB = features.values_V.view(len(self.keys), -1)
        if ids_FB.is_cpu and ids_FB.numel():
            largest_F = features.largest_F or largest_ids(ids_FB)
            if any(map(operator.ge, largest_F, self.rows)):
                self.check(features)
        return (ids_FB + self.starts_F1).view(-1)


def require_keys(features: JaggedFeatures, keys: tuple[str, ...]) -> None:
    if features.keys != keys:
        raise ValueError(f"the batch has features {features.keys}, the tables {keys}")


def require_ids(features: JaggedFeatures, keys: tuple[str, ...], rows: tuple[int, ...]) -> None:
    """Fail if an id is outside its table: a stacked lookup would read a row of another table."""
    for key, count in zip(keys, rows):
        ids, _ = features[key]
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count):
            raise DataError(
                f"ids of feature {key!r} run from {int(ids.min())} to {int(ids.max())}, its table has {count} rows",
                fix="enlarge --model.rows, or map ids that were never seen to 0",
            )


def pool(rows_V: Tensor, weight_RD: Tensor, features: JaggedFeatures) -> Tensor:
    """The sum of each bag's rows, F x B x D."""
    if features.one_id_a_bag:
        pooled = weight_RD.index_select(0, rows_V)
    else:
        pooled = F.embedding_bag(rows_V, weight_RD, features.offsets_FB1, mode="sum", include_last_offset=True)
    return pooled.view(len(features.keys), features.batch_size, weight_RD.shape[1])


def pool_backward(rows_V: Tensor, gradient_FBD: Tensor, features: JaggedFeatures, rows: int) -> Tensor:
    """The dense gradient of the stacked tables: each bag's gradient added to every row in the bag."""
    dim = gradient_FBD.shape[2]
    gradient_VD = gradient_FBD.reshape(-1, dim)
    if not features.one_id_a_bag:
        lengths = features.offsets_FB1.diff()
        gradient_VD = gradient_VD.repeat_interleave(lengths, dim=0, output_size=rows_V.numel())
    return gradient_VD.new_zeros(rows, dim).index_add_(0, rows_V, gradient_VD)
