"""Embedding tables whose gradient stays sparse: only the rows that a step used are updated.

`SparseTables` stacks one table per feature into one tensor. `HashedTable` is one table shared by all features: an id is
hashed, with its own seed per feature, to a row.

Shapes: V ids, F features, B samples, N = F * B bags, R rows of all tables, D width.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..data.batch import JaggedFeatures
from ..measure.spans import span
from ..ops.bag import Name, choose
from ..ops.bag.reference import stacked_rows
from .embeddings import Embeddings, require_ids
from .init import InitialRows
from .streams import SideStreams

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14


@dataclass(frozen=True)
class Used:
    """What a backward pass used: ids (or rows) and their bags, and the gradient of each bag."""

    ids_V: Tensor
    offsets_N1: Tensor
    gradient_ND: Tensor


class SparseGradients(Embeddings):
    """Keeps what backward passes used until the optimizer asks. Several passes before one update add up."""

    keys: tuple[str, ...]
    table_RD: Tensor
    bag: ModuleType
    starts_F: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.used: list[Used] = []
        self.group_early = True
        """Sort the ids in the backward pass, where that work belongs; an update that needs no sorting says no."""
        self.lanes = SideStreams()
        self._grouped: Any = None

    def group_ahead(self, ids_V: Tensor, features: JaggedFeatures) -> None:
        """Where there is a second queue, sort the ids while the step goes on; the update is who needs it."""
        if self.lanes.on and self.training and self.group_early and not self.used:
            with self.lanes.aside("ids", ids_V):
                self._grouped = self._group(Used(ids_V, features.offsets_FB1, ids_V))

    def backward(self, saved: Tensor, features: JaggedFeatures, gradient_FBD: Tensor) -> None:
        gradient_ND = gradient_FBD.reshape(-1, gradient_FBD.shape[2]).float()
        self.used.append(Used(saved, features.offsets_FB1, gradient_ND))
        if len(self.used) > 1:
            self._grouped = None
        elif self.group_early and self._grouped is None:
            self._grouped = self._group(self.used[0])

    def take_gradient(self) -> Used:
        """Everything since the last update as if it had been one batch, and forgotten here."""
        used = self._all_used()
        self.forget()
        return used

    def grouped(self) -> tuple[Any, Tensor]:
        """The used ids, equal rows together, and the gradient of each bag."""
        used = self._all_used()
        self.lanes.join("ids")
        if self._grouped is None:
            self._grouped = self._group(used)
        return self._grouped, used.gradient_ND

    def forget(self) -> None:
        self.lanes.keep(self.used, self._grouped)
        self.used, self._grouped = [], None

    def dense_gradient(self) -> Tensor:
        """The gradient of all rows as one tensor as large as the tables: for tests and small models."""
        grouped, gradient_ND = self.grouped()
        found = torch.zeros_like(self.table_RD)
        self.bag.update(found, None, grouped, gradient_ND, rate=-1.0, eps=0.0, decay=0.0, scale=1.0)
        return found

    def _all_used(self) -> Used:
        assert self.used, "no backward pass before this step"
        if len(self.used) > 1:
            self.used = [_joined(self.used, len(self.keys))]
        return self.used[0]

    def _group(self, used: Used) -> Any:
        return self.bag.Grouped(used.ids_V, used.offsets_N1, self.table_RD.shape[0], self.starts_F)


def _joined(used: list[Used], features: int) -> Used:
    """Several slices as one batch: feature-major again, the slices of a feature one after the other."""
    ids, lengths, gradients = [], [], []
    for feature in range(features):
        for part in used:
            bags = (part.offsets_N1.numel() - 1) // features
            edges = part.offsets_N1[feature * bags : (feature + 1) * bags + 1]
            ids.append(part.ids_V[int(edges[0]) : int(edges[-1])])
            lengths.append(edges.diff())
            gradients.append(part.gradient_ND[feature * bags : (feature + 1) * bags])
    offsets_N1 = torch.cat([used[0].offsets_N1.new_zeros(1), torch.cat(lengths).cumsum(0)])
    return Used(torch.cat(ids), offsets_N1, torch.cat(gradients))


class SparseTables(SparseGradients):
    """All features looked up by one call; the update sees each used row once, with its whole gradient.

    Ids of a bag are summed. Rows start uniform in +-1/sqrt(rows of their table), as the public DLRM's do, unless a
    standard deviation is given.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        rows: tuple[int, ...],
        dim: int,
        *,
        bag: Name = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if len(rows) != len(keys):
            raise ValueError(f"{len(keys)} tables need as many row counts, not {len(rows)}")
        self.keys, self.rows, self.dim = keys, rows, dim
        table_RD = torch.empty(sum(rows), dim, device=device)
        self.huge = "asked of the kernel" if ask_for_huge_pages(table_RD) else "no"
        self.register_buffer("table_RD", table_RD)
        self.table_RD: Tensor
        starts = [sum(rows[:index]) for index in range(len(rows))]
        self.starts = tuple(starts)
        self.register_buffer("starts_F", torch.tensor(starts, device=device), persistent=False)
        self.starts_F: Tensor
        self.bag, self.why = choose(bag, table_RD)

    def table(self, key: str) -> Tensor:
        """The rows of one table, a view."""
        index = self.keys.index(key)
        return self.table_RD[self.starts[index] : self.starts[index] + self.rows[index]]

    @torch.no_grad()
    def reset(self, std: float, seed: int) -> None:
        """A std of 0 means uniform in +-1/sqrt(rows)."""
        for key, rows in zip(self.keys, self.rows):
            InitialRows(rows, self.dim, std=std or None, seed=seed, name=f"table.{key}").fill_(self.table(key))

    def check(self, features: JaggedFeatures) -> None:
        require_ids(features, self.keys, self.rows)

    def rows_of(self, features: JaggedFeatures) -> Tensor:
        """The row of the stacked tensor each id means."""
        features = features.trimmed()
        return stacked_rows(features.values_V, features.offsets_FB1, self.starts_F)

    def forward(self, features: JaggedFeatures) -> dict[str, Tensor]:
        pooled_FBD, _ = self.record(features)
        return dict(zip(self.keys, pooled_FBD.unbind(0)))

    def record(self, features: JaggedFeatures) -> tuple[Tensor, Tensor]:
        if features.keys != self.keys:
            raise ValueError(f"the batch has features {features.keys}, the tables {self.keys}")
        ids_V = self._ids(features)
        self.group_ahead(ids_V, features)
        pooled = self.bag.bag_sum(self.table_RD, ids_V, features.offsets_FB1, self.starts_F)
        return pooled.view(len(self.keys), features.batch_size, -1), ids_V

    def _ids(self, features: JaggedFeatures) -> Tensor:
        """Only the Triton body can leave ids after the last bag alone; for the others they are cut off, which waits."""
        return features.values_V if self.bag.__name__.endswith("triton") else features.trimmed().values_V


class HashedTable(SparseGradients):
    """A table whose gradient never becomes as large as the table; `optimizer` updates the rows a step used."""

    def __init__(
        self,
        keys: tuple[str, ...],
        rows: int,
        dim: int,
        *,
        seed: int = 0,
        bag: Name = "auto",
        huge_pages: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.keys, self.rows, self.seed = keys, rows, seed
        # Made where it stays: moving it would hold two, and the choice of implementation depends on the place.
        table_RD = torch.empty(rows, dim, device=device)
        self.huge = "asked of the kernel" if huge_pages and ask_for_huge_pages(table_RD) else "no"
        self.register_buffer("table_RD", table_RD)
        self.table_RD: Tensor
        self.bag, self.why = choose(bag, table_RD)
        self.starts_F = None

    @torch.no_grad()
    def reset(self, std: float, seed: int) -> None:
        InitialRows(*self.table_RD.shape, std=std, seed=seed, name="table").fill_(self.table_RD)

    def check(self, features: JaggedFeatures) -> None:
        """Any id hashes to a row."""

    def working_set_bytes(self) -> int:
        """What is allocated: every row."""
        return self.table_RD.nbytes

    def rows_of(self, features: JaggedFeatures) -> Tensor:
        """The row each id of a batch hashes to."""
        if features.keys != self.keys:
            raise ValueError(f"the batch has features {features.keys}, the table {self.keys}")
        parts, start = [], 0
        for index, count in enumerate(features.ids_per_key):
            parts.append(self.bag.hash_rows(features.values_V[start : start + count], self.seed + index, self.rows))
            start += count
        return torch.cat(parts)

    def forward(self, features: JaggedFeatures) -> dict[str, Tensor]:
        pooled_FBD, _ = self.record(features)
        return dict(zip(self.keys, pooled_FBD.unbind(0)))

    def record(self, features: JaggedFeatures) -> tuple[Tensor, Tensor]:
        with span("hash"):
            rows_V = self.rows_of(features)
        pooled = self.bag.bag_sum(self.table_RD, rows_V, features.offsets_FB1)
        return pooled.view(len(self.keys), features.batch_size, -1), rows_V


def ask_for_huge_pages(tensor: Tensor) -> bool:
    """Ask the kernel to back a tensor that was not written yet with 2 MiB pages; false where it will not.

    A row of a large table is a miss in the TLB too, and with 4 KiB pages the page table itself misses the caches.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < 4 * HUGE_PAGE:
        return False
    begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = tensor.data_ptr() + tensor.nbytes - begin
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(begin, length, MADV_HUGEPAGE) == 0)
