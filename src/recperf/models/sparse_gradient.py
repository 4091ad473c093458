"""Embeddings whose gradient never becomes as large as their tables.

Shapes: V ids, F features, N = F * B bags, R rows of all tables, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..data.batch import JaggedFeatures
from .embeddings import Embeddings
from .lanes import Lanes


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
        self.lanes = Lanes()
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
