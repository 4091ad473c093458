"""Optimizers for tables with sparse gradients, and one that combines them with a dense optimizer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..measure.spans import span
from ..models.streams import SideStreams
from ..models.tables import HashedTable, SparseTables
from ..models.tiers.columns import TableColumns, require_read
from ..ops.table_rules import RULES, RuleName
from .loop import State
from .optim import DenseOptimizer

EPS = 1e-8


class SparseRows:
    """Updates the rows that the last batch used by a rule of `table_rules`, with decoupled weight decay.

    With `scatter` SGD adds by atomics on a GPU: without sorting, and with a last bit that varies from run to run.
    """

    def __init__(
        self,
        table: HashedTable | SparseTables,
        rule: RuleName,
        *,
        decay: float = 0.0,
        eps: float = EPS,
        scatter: bool = False,
    ) -> None:
        if scatter and (rule != "sgd" or decay):
            raise ValueError("scatter needs SGD without weight decay")
        self.table, self.rule, self.decay, self.eps, self.scatter = table, RULES[rule], decay, eps, scatter
        rows_RD, shape = table.table_RD, self.rule.state_shape(*table.table_RD.shape)
        self.state: Tensor | None = None
        """In tiers that of the rows in the cache."""
        if shape is not None:
            self.state = rows_RD.new_zeros(shape) if table.tiers is None else table.tiers.state_SK.view(shape)
        self.count = torch.zeros((), dtype=torch.float64, device=rows_RD.device) if self.rule.counts else None
        """The number of updates, where the rule needs it; on the device, so that a CUDA graph can count."""
        table.group_early = not scatter

    def saved_state(self) -> Tensor | TableColumns | None:
        """The state of all rows, for a checkpoint."""
        tiers = self.table.tiers
        if tiers is None or self.state is None:
            return self.state
        flat = self.state.dim() == 1
        return self.table.columns(slice(tiers.dim, tiers.store.width), {"kind": "zero"}, flat=flat)

    def squared_norm(self) -> float:
        if self.table.frozen:
            return 0.0
        grouped, gradient_ND = self.table.grouped()
        return float(self.table.bag.squared_norm(grouped, gradient_ND))

    def step(self, rate: float | Tensor, *, scale: float = 1.0) -> None:
        """Update the used rows with their gradient times the scale, and clear the gradient."""
        if self.table.frozen:
            return
        if self.scatter:
            assert isinstance(self.table, SparseTables)
            used = self.table.take_gradient()
            ids_V, starts_F = used.ids_V, self.table.starts_F
            if used.slots_U is not None:
                ids_V, starts_F = used.slots_U[ids_V], None
            self.table.bag.scatter_sgd(
                self.table.table_RD, ids_V, used.offsets_N1, used.gradient_ND, rate=rate, starts_F=starts_F
            )
            return
        grouped, gradient_ND = self.table.grouped()
        if self.count is not None:
            self.count += 1
        self.table.bag.update(
            self.table.table_RD,
            self.state,
            grouped,
            gradient_ND,
            rule=self.rule.name,
            rate=rate,
            eps=self.eps,
            decay=self.decay,
            scale=scale,
            count=1 if self.count is None else self.count,
        )
        self.table.forget()


class SplitOptimizer:
    """One optimizer for the dense parameters and `SparseRows` for the tables, clipped together.

    The tables' learning rate is the dense one times a fixed ratio, so both follow one schedule.
    """

    def __init__(
        self,
        dense: DenseOptimizer,
        sparse: SparseRows,
        *,
        table_ratio: float = 1.0,
        clip: float = 0.0,
        streams: SideStreams | None = None,
    ) -> None:
        self.dense, self.sparse, self.table_ratio, self.clip = dense, sparse, table_ratio, clip
        self.streams = streams or SideStreams()
        """CUDA streams on which weight gradients may still be computed."""

    @torch.no_grad()
    def step(self, learning_rate: float | Tensor) -> None:
        """Update everything; a learning rate on a GPU with side streams was computed before the backward pass."""
        scale = self._scale() if self.clip else 1.0
        with span("sparse_update"), self.streams.run_on("tables"):
            rate = learning_rate if self.table_ratio == 1.0 else learning_rate * self.table_ratio
            self.sparse.step(rate, scale=scale)
        with span("dense_update"):
            self.streams.join("weights")
            self.streams.join("biases")
            if scale < 1.0:
                for gradient in self.dense.gradients():
                    gradient.mul_(scale)
            self.dense.step(learning_rate)
            self.streams.join_all()

    def gradient_norm(self) -> Tensor:
        """Of the dense parameters; the tables' gradient exists only row by row, and is not counted."""
        self.streams.join("weights")
        self.streams.join("biases")
        return self.dense.gradient_norm()

    def _scale(self) -> float:
        """The factor that limits the norm of the whole gradient, dense and sparse, to `clip`."""
        squares = [float(g.square().sum()) for g in self.dense.gradients()]
        with span("sparse_update"):
            squares.append(self.sparse.squared_norm())
        norm = math.sqrt(sum(squares))
        return min(1.0, self.clip / norm) if norm else 1.0

    def state_dict(self) -> State:
        return {"dense": self.dense.state_dict(), "rows": self.sparse.saved_state(), "updates": self.sparse.count}

    def load_state_dict(self, state: State) -> None:
        self.dense.load_state_dict(state["dense"])
        if self.sparse.count is not None:
            self.sparse.count.copy_(state["updates"])
        if self.sparse.table.tiers is not None:
            # Reading the checkpoint has loaded it.
            if self.sparse.state is not None:
                require_read(state["rows"])
        elif self.sparse.state is not None:
            self.sparse.state.copy_(state["rows"])
