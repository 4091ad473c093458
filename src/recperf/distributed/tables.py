"""The tables of DLRMv4 on several ranks: TorchRec's EmbeddingCollection behind the methods of `DLRMv4Tables`.

A rank looks up the distinct rows of its own samples, so that each is sent to it once. `lookup` runs TorchRec's forward
pass and returns copies as leaves; `update` runs its backward pass with their gradients, in which fbgemm's optimizer
changes the tables in place.

Shapes: R rows of a table, D width, U distinct rows that a rank's batch uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..models.dlrm_v4.inputs import Inputs
from ..models.dlrm_v4.tables import ROWWISE_ADAGRAD, initial_table
from ..models.tiers.config import Tiers
from ..ops import lookup as ops
from ..ops.table_rules import RuleName
from .config import Demand, DistributedConfig
from .rank_tables import ON_DEVICE, RankTables
from .ranks import Ranks

EPS = 1e-8
"""Epsilon of the optimizers; fbgemm needs it when tables are made."""


class TorchRecTables(RankTables):
    """Like `DLRMv4Tables`, with the rows of all ranks behind it. Every rank calls every method equally often."""

    def __init__(
        self,
        demand: Demand,
        options: DistributedConfig,
        world: Ranks,
        optimizer: RuleName = ROWWISE_ADAGRAD,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        tiers: Tiers = ON_DEVICE,
    ) -> None:
        super().__init__(
            demand, options, world, optimizer=optimizer, eps=EPS, device=device, field="model.table_dim", tiers=tiers
        )
        self._rows: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Draw the initial values of a single process: each is a function of seed, table, row and column."""
        self.fill({name: initial_table(seed, name, rows, self.dim) for name, rows in self.rows.items()})
        self.forget()

    def lookup(self, inputs: Inputs) -> dict[str, Tensor]:
        """The rows of every table that this rank's samples use."""
        if inputs.rows is self._rows:
            return self._leaves
        if torch.is_grad_enabled() and self._leaves:
            raise RuntimeError("another batch still has gradients: call update() or forget() before the next lookup")
        outputs = self._lookup_shards(inputs.rows)
        for name in self.copies.names:
            outputs[name] = ops.gather(self.copies.table_RD[self.copies.rows_of(name)], inputs.rows[name])
        rows = {name: outputs[name].detach() for name in inputs.rows}
        if torch.is_grad_enabled():
            self._rows, self._outputs = inputs.rows, outputs
            self._leaves = {name: leaf.requires_grad_() for name, leaf in rows.items()}
        return rows

    def follow(self, part: Any, ready: Any = None) -> None:
        self.prefetch.follow(None if part is None else part.inputs.rows, ready)

    def _lookup_shards(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        output = self.prefetch.lookup(rows) if self.sharded else {}
        return {name: output[name].values() for name in self.sharded}

    def _keyed(self, rows: Mapping[str, Tensor]) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        ids = [rows[name].long() for name in self.sharded]
        lengths = torch.tensor([ids_U.shape[0] for ids_U in ids], dtype=torch.int32, device=self.device)
        return KeyedJaggedTensor(list(self.sharded), torch.cat(ids), lengths=lengths)

    def gradients(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Table, rows this rank used and their gradient, for every table that has one."""
        for name, leaf_UD in self._leaves.items():
            if leaf_UD.grad is not None:
                yield name, self._rows[name], leaf_UD.grad

    def forget(self) -> None:
        self._rows, self._leaves, self._outputs = {}, {}, {}

    def update(self, rate: float | Tensor, eps: float = EPS) -> None:
        """Update the rows that any rank used. A rank without a gradient sends zeros: the others wait for it."""
        if eps != EPS or float(rate) != self._rate:
            raise RuntimeError("fbgemm reads rate and eps in the lookup: call set_rate() before lookup()")
        gradients = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in self._leaves.items()
        }
        self.updates += 1
        names = self.sharded
        if names:
            torch.autograd.backward([self._outputs[name] for name in names], [gradients[name] for name in names])
            self.prefetch.finish()
        if self.copies.names:
            gradient_RD, used = torch.zeros_like(self.copies.table_RD), []
            for name in self.copies.names:
                # The rows of a rank's batch are distinct.
                gradient_RD[self.copies.rows_of(name)][self._rows[name].long()] = gradients[name]
                used.append(self._rows[name].long() + self.copies.starts[name])
            self.copies.update(gradient_RD, self._rate, torch.cat(used), self.updates)
        self.forget()
