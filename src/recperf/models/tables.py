"""Embedding tables whose gradient stays sparse: only the rows that a step used are updated.

`SparseTables` stacks one table per feature into one tensor. `HashedTable` is one table shared by all features: an id is
hashed, with its own seed per feature, to a row.

Where all rows do not fit on the device they lie in tiers: a batch to train on is placed in a cache first, whose slots
are then looked up and updated. Batches that are only scored read rows where they lie.

Shapes: V ids, F features, B samples, N = F * B bags, R rows of all tables, D width, U distinct rows of a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.batch import JaggedFeatures
from ..measure.spans import span
from ..ops.bag import Name, choose, reference
from ..ops.bag.native import ask_for_huge_pages
from ..ops.bag.reference import stacked_rows
from ..ops.lookup import unique
from .embeddings import Embeddings, PlacedFeatures, require_ids, require_keys
from .init import InitialRows
from .streams import SideStreams

if TYPE_CHECKING:
    from .tiers.cache import TieredRows
    from .tiers.columns import TableColumns

SHARED = "shared"
"""The name of the one table that all features share."""


@dataclass(frozen=True)
class Used:
    """The ids (or rows) of a backward pass, their bags, and the gradient of each bag."""

    ids_V: Tensor
    offsets_N1: Tensor
    gradient_ND: Tensor
    slots_U: Tensor | None = None
    """In tiers ids are places among the distinct rows of the batch, which lie in these slots."""


class SparseGradients(Embeddings):
    """One tensor of rows and the gradients since the last update; several backward passes before an update add up."""

    keys: tuple[str, ...]
    table_RD: Tensor
    starts_F: Tensor | None
    huge: str
    """Whether huge pages were requested from the kernel."""

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        bag: Name,
        device: torch.device | str,
        tiers: TieredRows | None,
    ) -> None:
        super().__init__()
        self.tiers = tiers
        if tiers is None:
            # Allocated where it stays: moving a large table would hold it twice.
            self.register_buffer("table_RD", torch.empty(rows, dim, device=device))
        else:
            # Not a buffer: it holds no particular rows, and placing writes to this very memory.
            self.table_RD = tiers.cache_SD
        self.huge = "asked of the kernel" if tiers is None and ask_for_huge_pages(self.table_RD) else "no"
        self.used: list[Used] = []
        self.streams = SideStreams()
        self._grouped: Any = None
        self._requested, self._chosen_for = bag, (self.table_RD.dtype, self.table_RD.device)
        self._chosen = choose(bag, self.table_RD)

    def _choice(self) -> tuple[ModuleType, str]:
        """The implementation and the reason, chosen anew after the table changed its type or device."""
        basis = self.table_RD.dtype, self.table_RD.device
        if self._chosen_for != basis:
            name: Name = self._requested if self.table_RD.dtype == torch.float32 else "auto"
            self._chosen, self._chosen_for = choose(name, self.table_RD), basis
        return self._chosen

    @property
    def bag(self) -> ModuleType:
        return self._choice()[0]

    @property
    def why(self) -> str:
        return self._choice()[1]

    def forward(self, features: JaggedFeatures) -> dict[str, Tensor]:
        pooled_FBD, _ = self.record(features)
        return dict(zip(self.keys, pooled_FBD.unbind(0)))

    @abstractmethod
    def rows_of(self, features: JaggedFeatures) -> Tensor:
        """The row of all tables that each id of a batch refers to."""

    def _checked_rows(self, features: JaggedFeatures) -> Tensor:
        """`rows_of`, where ids outside their table are an error on every device."""
        return self.rows_of(features)

    def place(self, features: JaggedFeatures, owner: object) -> PlacedFeatures:
        """Bring the rows of a batch into the cache, until the batch is finished."""
        assert self.tiers is not None
        ids = unique(self._checked_rows(features))
        placed = self.tiers.place(ids.values_U, owner)
        return PlacedFeatures(
            features.keys,
            ids.inverse_N,
            features.offsets_FB1,
            features.one_id_a_bag,
            rows_U=ids.values_U,
            slots_U=placed.index_N,
            placed=placed,
        )

    def _record_tiered(self, features: JaggedFeatures) -> tuple[Tensor, Tensor]:
        """The pooled rows of a batch that was placed, or else of one to score, whose rows are read where they lie."""
        assert self.tiers is not None
        if isinstance(features, PlacedFeatures):
            self.tiers.require_in_flight(features.placed)
            rows_XD, places_V = self.table_RD, features.slots_U[features.values_V]
            saved_V = features.values_V
        else:
            ids = unique(self._checked_rows(features))
            records_UW = self.tiers.records(ids.values_U)
            rows_XD, places_V = records_UW[:, : self.tiers.dim].contiguous(), ids.inverse_N
            saved_V = places_V
        pooled = self.bag.bag_sum(rows_XD, places_V, features.offsets_FB1)
        return pooled.view(len(self.keys), features.batch_size, -1), saved_V

    def _reset_tiered(self, initial: dict[str, InitialRows]) -> None:
        assert self.tiers is not None
        self.tiers.initial = lambda name, rows_N: initial[name].rows(rows_N)
        self.tiers.clear()
        parts = [{"rows": one.description["rows"], "initial": one.description} for one in initial.values()]
        self._initial = {"kind": "stacked", "parts": parts}

    def columns(self, columns: slice, initial: dict[str, Any] | None = None, *, flat: bool = False) -> TableColumns:
        """Columns of all records in tiers: by default of weights, as the tensor that they would be on the device."""
        assert self.tiers is not None
        initial = self._initial if initial is None else initial
        from .tiers.columns import whole_columns

        return whole_columns(self.tiers, columns, initial, flat=flat)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.tiers is not None:
            destination[f"{prefix}table_RD"] = self.columns(slice(0, self.tiers.dim))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Reading a checkpoint has loaded the rows of tables in tiers."""
        if self.tiers is None:
            super()._load_from_state_dict(state_dict, prefix, *more)
        else:
            from .tiers.columns import require_read

            require_read(state_dict.get(f"{prefix}table_RD"))

    def group_ahead(self, ids_V: Tensor, features: JaggedFeatures) -> None:
        """With a second stream, sort the ids during the forward pass; only the update needs the result."""
        if self.streams.enabled and self.training and not self.used and not self.frozen:
            with self.streams.run_on("ids", ids_V):
                self._grouped = self._group(Used(ids_V, features.offsets_FB1, ids_V))

    def backward(self, saved: Tensor, features: JaggedFeatures, gradient_FBD: Tensor) -> None:
        gradient_ND = gradient_FBD.reshape(-1, gradient_FBD.shape[2]).to(self.table_RD.dtype)
        slots_U = features.slots_U if isinstance(features, PlacedFeatures) else None
        if self.tiers is not None and slots_U is None:
            raise RuntimeError("tables in tiers train on batches that were placed")
        self.used.append(Used(saved, features.offsets_FB1, gradient_ND, slots_U))
        if len(self.used) > 1:
            self._grouped = None
        elif self._grouped is None:
            self._grouped = self._group(self.used[0])
        # The update need not wait for the backward passes that follow.
        self.streams.fork("tables")

    def grouped(self) -> tuple[Any, Tensor]:
        """The used ids, equal rows together, and the gradient of each bag."""
        used = self._all_used()
        self.streams.join("ids")
        if self._grouped is None:
            self._grouped = self._group(used)
        return self._grouped, used.gradient_ND

    def forget(self) -> None:
        self.streams.hold(self.used, self._grouped)
        self.used, self._grouped = [], None

    def dense_gradient(self) -> Tensor:
        """The gradient of all rows as one tensor of the tables' size: for tests and small models."""
        grouped, gradient_ND = self.grouped()
        gradient_RD = torch.zeros_like(self.table_RD)
        self.bag.update(gradient_RD, None, grouped, gradient_ND, rule="sgd", rate=-1.0, eps=0.0, decay=0.0, scale=1.0)
        return gradient_RD

    def _all_used(self) -> Used:
        assert self.used, "no backward pass before this step"
        if len(self.used) > 1:
            self.used = [_joined(self.used, len(self.keys))]
        return self.used[0]

    def _group(self, used: Used) -> Any:
        if used.slots_U is None:
            return self.bag.Grouped(used.ids_V, used.offsets_N1, self.table_RD.shape[0], self.starts_F)
        # Grouped by places among the distinct rows, not by slots: in the order that the whole table would have.
        grouped = self.bag.Grouped(used.ids_V, used.offsets_N1, max(1, len(used.slots_U)))
        return grouped.moved(used.slots_U, self.table_RD.shape[0])


def _joined(used: list[Used], features: int) -> Used:
    """Several slices as one batch: feature-major again, the slices of a feature in sequence."""
    ids, lengths, gradients = [], [], []
    if any(part.slots_U is not used[0].slots_U for part in used):
        raise RuntimeError("gradients of several batches: rows in tiers are updated after each batch")
    for feature in range(features):
        for part in used:
            bags = (part.offsets_N1.numel() - 1) // features
            edges = part.offsets_N1[feature * bags : (feature + 1) * bags + 1]
            ids.append(part.ids_V[int(edges[0]) : int(edges[-1])])
            lengths.append(edges.diff())
            gradients.append(part.gradient_ND[feature * bags : (feature + 1) * bags])
    offsets_N1 = torch.cat([used[0].offsets_N1.new_zeros(1), torch.cat(lengths).cumsum(0)])
    return Used(torch.cat(ids), offsets_N1, torch.cat(gradients), used[0].slots_U)


class SparseTables(SparseGradients):
    """A table per feature, stacked in one tensor and looked up by one call; ids of a bag are summed.

    Rows start uniform in +-1/sqrt(rows of their table), as in the public DLRM, unless a standard deviation is given.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        rows: tuple[int, ...],
        dim: int,
        *,
        bag: Name = "auto",
        device: torch.device | str = "cpu",
        tiers: TieredRows | None = None,
    ) -> None:
        super().__init__(sum(rows), dim, bag=bag, device=device, tiers=tiers)
        if len(rows) != len(keys):
            raise ValueError(f"{len(keys)} tables need as many row counts, not {len(rows)}")
        self.keys, self.rows = keys, rows
        self.starts = tuple(sum(rows[:index]) for index in range(len(rows)))
        self.register_buffer("starts_F", torch.tensor(self.starts, device=device), persistent=False)

    def table(self, key: str) -> Tensor:
        """The rows of one table, a view."""
        if self.tiers is not None:
            raise RuntimeError("the rows of a table in tiers do not lie in one tensor")
        index = self.keys.index(key)
        return self.table_RD[self.starts[index] : self.starts[index] + self.rows[index]]

    @torch.no_grad()
    def reset(self, std: float, seed: int) -> None:
        """Draw the initial rows; a std of 0 means uniform in +-1/sqrt(rows)."""
        dim = self.table_RD.shape[1]
        initial = (
            (key, InitialRows(rows, dim, std=std or None, seed=seed, name=f"table.{key}"))
            for key, rows in zip(self.keys, self.rows)
        )
        if self.tiers is not None:
            self._reset_tiered(dict(initial))
        else:
            for key, table in initial:
                table.fill_(self.table(key))

    def check(self, features: JaggedFeatures) -> None:
        require_ids(features, self.keys, self.rows)

    def rows_of(self, features: JaggedFeatures) -> Tensor:
        """The row of the stacked tensor that each id refers to."""
        if isinstance(features, PlacedFeatures):
            return features.rows_U[features.values_V]
        features = features.trimmed()
        return stacked_rows(features.values_V, features.offsets_FB1, self.starts_F)

    def _checked_rows(self, features: JaggedFeatures) -> Tensor:
        require_keys(features, self.keys)
        features = features.trimmed()
        ids = features.values_V, features.offsets_FB1, sum(self.rows), self.starts_F
        rows_V: Tensor = self.bag.checked_rows(*ids) if ids[0].is_cpu else reference.checked_rows(*ids, wait=True)
        return rows_V

    def record(self, features: JaggedFeatures) -> tuple[Tensor, Tensor]:
        require_keys(features, self.keys)
        if self.tiers is not None:
            return self._record_tiered(features)
        ids_V = self._ids(features)
        self.group_ahead(ids_V, features)
        pooled = self.bag.bag_sum(self.table_RD, ids_V, features.offsets_FB1, self.starts_F)
        return pooled.view(len(self.keys), features.batch_size, -1), ids_V

    def _ids(self, features: JaggedFeatures) -> Tensor:
        """Only Triton can ignore ids after the last bag; for the others they are cut off, which waits for a GPU."""
        return features.values_V if self.bag.__name__.endswith("triton") else features.trimmed().values_V


class HashedTable(SparseGradients):
    """One table that all features share: each id is hashed, with the number of its feature as seed, to a row."""

    starts_F = None

    def __init__(
        self,
        keys: tuple[str, ...],
        rows: int,
        dim: int,
        *,
        bag: Name = "auto",
        device: torch.device | str = "cpu",
        tiers: TieredRows | None = None,
    ) -> None:
        super().__init__(rows, dim, bag=bag, device=device, tiers=tiers)
        self.keys, self.rows = keys, rows

    @torch.no_grad()
    def reset(self, std: float, seed: int) -> None:
        initial = InitialRows(self.rows, self.table_RD.shape[1], std=std, seed=seed, name="table")
        if self.tiers is not None:
            self._reset_tiered({SHARED: initial})
        else:
            initial.fill_(self.table_RD)

    def check(self, features: JaggedFeatures) -> None:
        """Accept any id: all of them hash to a row."""

    def rows_of(self, features: JaggedFeatures) -> Tensor:
        """The row that each id of a batch hashes to."""
        require_keys(features, self.keys)
        if isinstance(features, PlacedFeatures):
            return features.rows_U[features.values_V]
        parts, start = [], 0
        for index, count in enumerate(features.ids_per_key):
            parts.append(self.bag.hash_rows(features.values_V[start : start + count], index, self.rows))
            start += count
        return torch.cat(parts)

    def record(self, features: JaggedFeatures) -> tuple[Tensor, Tensor]:
        if self.tiers is not None:
            return self._record_tiered(features)
        with span("hash"):
            rows_V = self.rows_of(features)
        pooled = self.bag.bag_sum(self.table_RD, rows_V, features.offsets_FB1)
        return pooled.view(len(self.keys), features.batch_size, -1), rows_V
