"""Optimizers for a table whose gradient stays sparse, and one that steps it beside a dense optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..measure.spans import span
from ..models.hashed import HashedTable
from .optim import AdamW

EPS = 1e-8


class SparseRows:
    """Row-wise Adagrad, or SGD, with decoupled decay, of the rows that the last backward pass used."""

    def __init__(self, table: HashedTable, *, adagrad: bool, decay: float) -> None:
        self.table, self.decay = table, decay
        device = table.table_RD.device
        self.state_R: Tensor | None = torch.zeros(table.rows, device=device) if adagrad else None

    def squared_norm(self) -> float:
        gradient = self.table.gradient
        assert gradient is not None, "no backward pass before this step"
        found: float = self.table.bag.squared_norm(gradient.grouped, gradient.gradient_BD)
        return found

    def step(self, rate: float, *, scale: float = 1.0) -> None:
        """Update the used rows with their gradient times the scale, and forget the gradient."""
        gradient = self.table.gradient
        assert gradient is not None, "no backward pass before this step"
        self.table.bag.update(
            self.table.table_RD,
            self.state_R,
            gradient.grouped,
            gradient.gradient_BD,
            rate=rate,
            eps=EPS,
            decay=self.decay,
            scale=scale,
        )
        self.table.gradient = None


class SplitOptimizer:
    """AdamW for the dense parameters and `SparseRows` for the table, clipped together.

    The loop gives AdamW's rate; the table's is that times a fixed ratio, so both follow one schedule.
    """

    def __init__(self, dense: AdamW, sparse: SparseRows, *, table_ratio: float, clip: float) -> None:
        self.dense, self.sparse, self.table_ratio, self.clip = dense, sparse, table_ratio, clip

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        scale = self._scale() if self.clip else 1.0
        with span("dense_update"):
            if scale < 1.0:
                for group in self.dense.groups:
                    for gradient in group.gradients():
                        gradient.mul_(scale)
            self.dense.step(learning_rate)
        with span("sparse_update"):
            self.sparse.step(learning_rate * self.table_ratio, scale=scale)

    def _scale(self) -> float:
        """What brings the norm of the whole gradient, dense and sparse, down to the limit."""
        squares = [float(g.square().sum()) for group in self.dense.groups for g in group.gradients()]
        with span("sparse_update"):
            squares.append(self.sparse.squared_norm())
        norm = math.sqrt(sum(squares))
        return min(1.0, self.clip / norm) if norm else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"dense": self.dense.state_dict(), "rows": self.sparse.state_R}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dense.load_state_dict(state["dense"])
        if self.sparse.state_R is not None:
            self.sparse.state_R.copy_(state["rows"])
