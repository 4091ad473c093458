"""One physical table shared by all features: each id is hashed, with a seed a feature, to a row.

Shapes: V ids, F features, B samples, R rows, D width.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..data.batch import JaggedFeatures
from ..measure.spans import span
from ..ops.bag import Name, choose
from .init import generator
from .sparse_gradient import SparseGradients

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14
PATTERN = 1 << 20
"""Initial values repeat after so many: drawing each of hundreds of millions would take longer than the training."""


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
        drawn = torch.empty(min(PATTERN, self.table_RD.numel())).normal_(0.0, std, generator=generator(seed, "table"))
        drawn = drawn.to(self.table_RD.device)
        flat = self.table_RD.view(-1)
        for start in range(0, flat.numel(), drawn.numel()):
            part = flat[start : start + drawn.numel()]
            part.copy_(drawn[: part.numel()])

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
