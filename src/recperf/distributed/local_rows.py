"""The rows that this rank holds: FBGEMM looks them up and updates them, on the device or in a cache of those in use.

Shapes: R rows of this rank's shards one after the other, S slots of a cache, V ids that arrived, U distinct rows among
them, F tables, M bags of each table, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ..models.tiers.cache import TieredRows
from ..models.tiers.config import Tiers
from ..models.tiers.opening import open_tiers
from ..ops.lookup import unique
from ..ops.table_rules import TableRule
from .placement import TableShard


class LocalRows:
    """Shards of one width as one table of FBGEMM, whose optimizer changes rows in the backward pass. In tiers that
    table is the cache of the rows in use."""

    def __init__(
        self,
        shards: Sequence[TableShard],
        *,
        rule: TableRule,
        eps: float,
        device: torch.device,
        tiers: Tiers,
    ) -> None:
        self.shards = {shard.table: shard for shard in shards}
        self.rule, self.eps, self.device, self.width = rule, eps, device, shards[0].columns
        rows = {name: shard.rows for name, shard in self.shards.items()}
        self.starts = dict(zip(rows, torch.tensor([0, *rows.values()]).cumsum(0).tolist()))
        self.tiers: TieredRows | None = None
        self.updates = 0
        """How many updates there were before the next one."""
        if tiers.placement == "device":
            self._allocate(sum(rows.values()))
        else:
            state = rule.state_width(self.width)
            self.tiers = open_tiers(rows, tiers, dim=self.width, state=state, device=device, memory=self._allocate)

    def _allocate(self, count: int) -> list[Tensor]:
        """The memory of so many rows: weights, and the states of the optimizer."""
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        cuda = self.device.type == "cuda"
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self._table: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(count, self.width, *place)],
            optimizer=getattr(EmbOptimType, self.rule.fbgemm),
            eps=self.eps,
            learning_rate=0.0,
            pooling_mode=PoolingMode.SUM,
            device=self.device,
        )
        states = self._table.split_optimizer_states()
        held = self._table.split_embedding_weights()[0], *(states[0] if states else ())
        # Without autograd's count of changes: rows are fetched between a lookup and its backward pass, to other slots.
        self._held = [column.data for column in held]
        return self._held

    def set_rate(self, rate: float, updates: int) -> None:
        self._table.set_learning_rate(rate)
        self.updates = updates

    def local(self) -> list[tuple[TableShard, Tensor, list[Tensor]]]:
        """The shards with their rows and the states of these; in tiers there are no such tensors."""
        held = []
        for name, shard in self.shards.items() if self.tiers is None else ():
            rows = slice(self.starts[name], self.starts[name] + shard.rows)
            weights, *states = (column[rows] for column in self._held)
            held.append((shard, weights, states))
        return held

    def sums(self, places_V: Tensor, offsets: Tensor) -> Tensor:
        """The sums of bags of rows, whose backward pass updates the rows."""
        if self.rule.counts:
            # A step has several lookups, and those of an evaluation count there too.
            self._table.iter.fill_(self.updates)
            self._table.iter_cpu.fill_(self.updates)
        sums: Tensor = self._table(places_V, offsets)
        return sums


def _nothing(*, trained: bool = True) -> None:
    """Rows that are all on the device need not be told."""


class Lookup(nn.Module):
    """What TorchRec calls with the ids that arrived for tables that are sharded in the same way."""

    def __init__(self, rows: LocalRows | None, names: Sequence[str], *, pooled: bool, device: torch.device) -> None:
        """`names` are the tables in the order of their ids; `rows` is None where this rank has none of them."""
        super().__init__()
        self.rows, self.names, self.pooled, self.device = rows, tuple(names), pooled, device
        self.starts_F = torch.tensor([rows.starts[name] for name in names] if rows else [], device=device).long()

    def place(self, ids: Any, *, required: bool) -> tuple[Any, Callable[..., None]] | None:
        """The places of the rows of ids that arrived, and what is to be called when they were used: in tiers they are
        slots until then. None, unless `required`, where the batch before leaves too few slots."""
        if self.rows is None:
            return ids, _nothing
        tiers, finish = self.rows.tiers, _nothing
        counts_F = ids.lengths().view(len(self.names), -1).sum(1)
        places_V = ids.values() + self.starts_F.repeat_interleave(counts_F, output_size=ids.values().numel())
        if tiers is not None:
            began, distinct = perf_counter(), unique(places_V)
            place = tiers.place if required else tiers.try_place
            placed = place(distinct.values_U, object())
            tiers.waited(perf_counter() - began)
            if placed is None:
                return None
            places_V, finish = placed.index_N[distinct.inverse_N], partial(tiers.finish, placed)
        return type(ids)(ids.keys(), places_V, lengths=ids.lengths(), stride=ids.stride()), finish

    def forward(self, placed: Any) -> Tensor:
        """Single rows, V x D, or the sums of bags, M x FD."""
        places_V, bags = placed.values(), placed.stride()
        if self.rows is None or (not self.pooled and not places_V.numel()):
            # FBGEMM has no operator for nothing at all.
            return torch.zeros(bags if self.pooled else 0, 0, device=self.device, requires_grad=True)
        if not self.pooled:
            return self.rows.sums(places_V, torch.arange(len(places_V) + 1, device=self.device))
        sums = self.rows.sums(places_V, placed.offsets())
        return sums.view(len(self.names), bags, -1).transpose(0, 1).reshape(bags, -1)
