"""A table a feature, stacked into one tensor, whose gradient stays sparse: only the rows a step used are updated.

Shapes: V ids, F features, B samples, R rows of all tables, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..data.batch import JaggedFeatures
from ..ops.bag import Name, choose
from ..ops.bag.reference import stacked_rows
from .embeddings import require_ids
from .hashed import ask_for_huge_pages
from .init import generator
from .sparse_gradient import SparseGradients

PATTERN = 1 << 22
"""Initial values of a table repeat after so many: drawing billions on the host would outlast a training."""


def pattern(key: str, rows: int, numbers: int, std: float, seed: int) -> Tensor:
    """Initial values of a table, row after row, which begin again after the last; a std of 0: +-1/sqrt(rows)."""
    draw, drawn = generator(seed, f"table.{key}"), torch.empty(min(PATTERN, numbers))
    drawn = drawn.normal_(0, std, generator=draw) if std else drawn.uniform_(-1, 1, generator=draw)
    return drawn.mul_(1 if std else rows**-0.5)


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
        self.keys, self.rows = keys, rows
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
            flat = self.table(key).view(-1)
            drawn = pattern(key, rows, flat.numel(), std, seed).to(flat.device)
            for start in range(0, flat.numel(), drawn.numel()):
                part = flat[start : start + drawn.numel()]
                part.copy_(drawn[: part.numel()])

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
