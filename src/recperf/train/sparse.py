"""Optimizers for tables whose gradient stays sparse, and one that steps them beside a dense optimizer."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from ..measure.spans import span
from ..models.streams import SideStreams
from ..models.tables import HashedTable, SparseTables

EPS = 1e-8


class Dense(Protocol):
    """The optimizer of everything that is not a table."""

    def step(self, learning_rate: float | Tensor) -> None: ...

    def gradients(self) -> list[Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SparseRows:
    """Adagrad (a state a row, or with `each` a number of it) or SGD, with decoupled decay, of the rows just used.

    With `scatter`, SGD adds by atomics on a GPU: no sorting, and a last bit that varies from run to run.
    """

    def __init__(
        self,
        table: HashedTable | SparseTables,
        *,
        adagrad: bool,
        decay: float = 0.0,
        eps: float = EPS,
        each: bool = False,
        scatter: bool = False,
    ) -> None:
        if scatter and (adagrad or decay):
            raise ValueError("scattering updates are for SGD without decay alone")
        self.table, self.decay, self.eps, self.scatter = table, decay, eps, scatter
        rows_RD = table.table_RD
        shape = rows_RD.shape if each else rows_RD.shape[:1]
        self.state_R: Tensor | None = torch.zeros(shape, device=rows_RD.device) if adagrad else None
        table.group_early = not scatter

    def squared_norm(self) -> float:
        grouped, gradient_ND = self.table.grouped()
        found: float = self.table.bag.squared_norm(grouped, gradient_ND)
        return found

    def step(self, rate: float | Tensor, *, scale: float = 1.0) -> None:
        """Update the used rows with their gradient times the scale, and forget the gradient."""
        if self.scatter:
            assert isinstance(self.table, SparseTables)
            used = self.table.take_gradient()
            self.table.bag.scatter_sgd(
                self.table.table_RD, used.ids_V, used.offsets_N1, used.gradient_ND, rate=rate,
                starts_F=self.table.starts_F,
            )  # fmt: skip
            return
        grouped, gradient_ND = self.table.grouped()
        self.table.bag.update(
            self.table.table_RD,
            self.state_R,
            grouped,
            gradient_ND,
            rate=rate,
            eps=self.eps,
            decay=self.decay,
            scale=scale,
        )
        self.table.forget()


class SplitOptimizer:
    """One optimizer for the dense parameters and `SparseRows` for the tables, clipped together.

    The loop gives the dense rate; the tables' is that times a fixed ratio, so both follow one schedule.
    """

    def __init__(
        self,
        dense: Dense,
        sparse: SparseRows,
        *,
        table_ratio: float = 1.0,
        clip: float = 0.0,
        lanes: SideStreams | None = None,
    ) -> None:
        self.dense, self.sparse, self.table_ratio, self.clip = dense, sparse, table_ratio, clip
        self.lanes = lanes or SideStreams()
        """Where weight gradients may still be on their way."""

    @torch.no_grad()
    def step(self, learning_rate: float | Tensor) -> None:
        scale = self._scale() if self.clip else 1.0
        with span("sparse_update"), self.lanes.aside("tables"):
            rate = learning_rate if self.table_ratio == 1.0 else learning_rate * self.table_ratio
            self.sparse.step(rate, scale=scale)
        with span("dense_update"):
            self.lanes.join("weights")
            if scale < 1.0:
                for gradient in self.dense.gradients():
                    gradient.mul_(scale)
            self.dense.step(learning_rate)
            self.lanes.join_all()

    def _scale(self) -> float:
        """What brings the norm of the whole gradient, dense and sparse, down to the limit."""
        squares = [float(g.square().sum()) for g in self.dense.gradients()]
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
