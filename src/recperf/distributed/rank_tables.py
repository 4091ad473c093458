"""What the tables of the click models (bags.py) and of DLRMv4 (tables.py) have in common on several ranks.

Shapes: R rows of all copied tables one after the other, D width.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..models.init import InitialRows, UniformRows
from ..models.tiers.cache import TieredRows
from ..models.tiers.columns import Rectangle, RowBlock, Shard, Sharded, TableColumns
from ..models.tiers.config import Placement, Tiers
from ..ops.table_rules import RULES, RuleName, TableRule
from .config import Demand, DistributedConfig
from .exchange import Prefetch
from .library import require_torchrec
from .placement import ShardPlacement, TableShard, placed_by, shards_of
from .ranks import Ranks
from .sharding import LocalRows, Lookup, collection, free_memory, require_possible, require_room

ON_DEVICE = Tiers("device", 0, "device: each rank holds its shards")
PLACES = get_args(Placement)
CHUNK = 1 << 22
"""Initial values copied at a time."""


def agreed(world: Ranks, tiers: Tiers) -> Tiers:
    """What all ranks do, each of which has decided by its own free memory."""
    placement = PLACES[world.maximum(PLACES.index(tiers.placement))]
    return replace(tiers, placement=placement, cache_bytes=-world.maximum(-tiers.cache_bytes))


class CopiedTables:
    """Data-parallel tables, of which every rank has a copy: they are so small that sending their rows costs more.

    Their gradient is one dense tensor that is summed in one message, as in TorchRec. Its own data-parallel kernel
    (1.8.0) is not used: in an EmbeddingCollection it fails on a CPU, where it pools the rows of a lookup; fbgemm's
    fused optimizers do not apply to it, so the update would be ours anyway; and DDP sums inside its C++ reducer, where
    waiting for a rank cannot be told from work.
    """

    def __init__(
        self,
        placed: Sequence[ShardPlacement],
        dim: int,
        world: Ranks,
        device: torch.device,
        *,
        rule: TableRule,
        eps: float,
    ) -> None:
        self.rows = {one.table.name: one.table.rows for one in placed}
        self.names, self.dim, self.world, self.rule, self.eps = tuple(self.rows), dim, world, rule, eps
        self.parts, total = shards_of(placed), sum(self.rows.values())
        self.table_RD = torch.zeros(total, dim, device=device)
        shape = rule.state_shape(total, dim)
        self.state = None if shape is None else torch.zeros(shape, device=device)
        ends = torch.tensor([0, *self.rows.values()]).cumsum(0).tolist()
        self.starts = dict(zip(self.rows, ends))

    def rows_of(self, name: str) -> slice:
        """The rows of a table."""
        return slice(self.starts[name], self.starts[name] + self.rows[name])

    def local(self) -> list[tuple[TableShard, Tensor, list[Tensor]]]:
        """This rank's copies, and the optimizer's states of them."""
        own = [part for part in self.parts if part.rank == self.world.rank]
        slices = [self.rows_of(part.table) for part in own]
        states = [[] if self.state is None else [*_by_kind(self.state[rows], self.dim)] for rows in slices]
        return [(part, self.table_RD[rows], state) for part, rows, state in zip(own, slices, states)]

    @torch.no_grad()
    def update(self, gradient_RD: Tensor, rate: float, rows_V: Tensor, count: int) -> None:
        """Sum the gradient over the ranks and update the rows that any rank used (`rows_V` are this rank's): the copies
        of all ranks stay equal to the bit. `count` is the number of updates including this one."""
        gradient_RD = self.world.sum_(gradient_RD)
        rows_U = torch.arange(len(gradient_RD), device=gradient_RD.device)
        if self.rule.counts:
            # With the other rules rows that nobody used have a gradient of zero, which changes nothing.
            used_R = self.world.sum_(gradient_RD.new_zeros(len(gradient_RD)).index_fill_(0, rows_V, 1.0))
            rows_U = used_R.nonzero().flatten()
            gradient_RD = gradient_RD.index_select(0, rows_U)
        self.rule.apply_(self.table_RD, self.state, rows_U, gradient_RD, rate=rate, eps=self.eps, count=count)


def _by_kind(state: Tensor, dim: int) -> Sequence[Tensor]:
    """The states of one kind after the other, as FBGEMM has them: each with a number for every row or weight."""
    return [state] if state.dim() == 1 else torch.split(state, dim, 1)


class RankTables(nn.Module):
    """Tables of one width on several ranks: copies of the data-parallel ones, and shards of the others, of which single
    rows (TorchRec's EmbeddingCollection) or sums of rows (EmbeddingBagCollection) are sent."""

    def __init__(
        self,
        demand: Demand,
        options: DistributedConfig,
        world: Ranks,
        *,
        optimizer: RuleName,
        eps: float,
        device: torch.device | str,
        field: str,
        tiers: Tiers,
    ) -> None:
        """`field` is the config field with the width of the tables; `tiers` is where the rows of shards lie."""
        super().__init__()
        placed = placed_by(options, demand, world.size)
        require_possible(placed, world, optimizer=optimizer, field=field, tiers=tiers)
        require_torchrec()
        self.rows = {table.name: table.rows for table in demand.tables}
        self.names, self.dim, self.rule = tuple(self.rows), demand.tables[0].dim, RULES[optimizer]
        self.world, self.device = world, torch.device(device)
        copied = [one for one in placed if one.kind == "data-parallel"]
        sharded = [one for one in placed if one.kind != "data-parallel"]
        self.copies = CopiedTables(copied, self.dim, world, self.device, rule=self.rule, eps=eps)
        self.sharded = tuple(one.table.name for one in sharded)
        """The names of the sharded tables."""
        shards = shards_of(sharded, tiers.placement)
        self.parts = self.copies.parts + shards
        self._own = [shard for shard in shards if shard.rank == world.rank]
        self._local: dict[int, LocalRows] = {}
        """This rank's shards, by their width."""
        self.prefetch = Prefetch(None, self._keyed, self.device)
        if sharded:
            if tiers.placement == "device":
                require_room(sharded, demand, world.device, free_memory(world, self.device)[self.device.type])
            self._shard(sharded, shards, options, eps, tiers)
        self.initial: Mapping[str, InitialRows | UniformRows] = {}
        """How the rows of each table begin."""
        self._rate = 0.0
        self.updates = 0
        """The number of updates so far."""

    def _shard(
        self,
        placed: Sequence[ShardPlacement],
        shards: list[TableShard],
        options: DistributedConfig,
        eps: float,
        tiers: Tiers,
    ) -> None:
        """Allocate this rank's shards."""
        widths = {shard.table: shard.columns for shard in self._own}
        for width in sorted(set(widths.values())):
            own = [shard for shard in self._own if shard.columns == width]
            self._local[width] = LocalRows(own, rule=self.rule, eps=eps, device=self.device, tiers=tiers)

        def lookup(names: Sequence[str]) -> Lookup:
            rows = self._local[widths[names[0]]] if names else None
            return Lookup(rows, names, pooled=placed[0].table.pooled, device=self.device)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sharded = collection([one.table for one in placed], shards, options, self.device, lookup)
        self.prefetch = Prefetch(sharded, self._keyed, self.device)

    @abstractmethod
    def _keyed(self, batch: Any) -> Any:
        """A batch as TorchRec's KeyedJaggedTensor."""

    @abstractmethod
    def follow(self, part: Any, ready: Any = None) -> None:
        """Announce this rank's part of the batch after the next one, and the event after which it is there: its ids are
        sent while the next one is computed. None: there is none."""

    def local(self) -> list[tuple[TableShard, Tensor, list[Tensor]]]:
        """This rank's shards and copies on the device: their rectangles, rows, and the optimizer's states of those,
        each with a number per row or per weight."""
        return [held for rows in self._local.values() for held in rows.local()] + self.copies.local()

    @property
    def tiers(self) -> TieredRows | None:
        """The rows of this rank's shards, which have one width, where they do not lie on the device."""
        return next((rows.tiers for rows in self._local.values()), None)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next update, before its rows are looked up: fbgemm reads it in the lookup."""
        self._rate = float(rate)
        for rows in self._local.values():
            rows.set_rate(self._rate, self.updates)

    @torch.no_grad()
    def fill(self, initial: Mapping[str, InitialRows | UniformRows]) -> None:
        """Give all rows the initial values of a single process; those in tiers get them when they are needed."""
        count, self.initial = max(1, CHUNK // self.dim), initial
        if self.tiers is not None:
            first = {shard.table: shard.first_row for shard in self._own}
            self.tiers.initial = lambda name, rows_N: initial[name].rows(rows_N + first[name])
            self.tiers.clear()
        for part, weight_RD, states in self.local():
            for start in range(0, part.rows, count):
                # A row is drawn whole, and a shard of some columns keeps those.
                whole = torch.empty(min(count, part.rows - start), self.dim, device=weight_RD.device)
                initial[part.table].fill_(whole, part.first_row + start)
                columns = slice(part.first_column, part.first_column + part.columns)
                weight_RD[start : start + whole.shape[0]] = whole[:, columns]
            for state in states:
                state.zero_()

    def sharded_state(self) -> dict[str, Sharded | TableColumns]:
        """Tables and their optimizer states as this rank has them, under the names a single process saves them by.

        Row-wise Adagrad has one number for each row: the sum over steps of the mean squared gradient over the row's
        columns. Where a table is sharded by columns, each shard has the number of its own columns. The number of the
        whole row is then their mean, weighted by columns, which a single process would have got from the same
        gradients. In the other direction each shard begins with the number of the whole row. Element-wise Adagrad has a
        state as large as the table, which is sharded like it; SGD has none. A number for each row beside those for its
        weights is a column of its own.
        """
        state: dict[str, Sharded | TableColumns] = {}
        local, tiers = self.local(), self.tiers
        for number, name in enumerate(self.names):
            weights, states = [], []
            for part, weight, own_states in (held for held in local if held[0].table == name):
                rectangle = Rectangle(part.first_row, part.rows, part.first_column, part.columns)
                # Any rank could write a data-parallel table: they take turns.
                writes = part.kind != "data-parallel" or number % self.world.size == self.world.rank
                weights.append(Shard(rectangle, weight.detach(), writes))
                for kind, own in enumerate(own_states):
                    # In one process the states of one kind lie to the right of those of the kind before.
                    right = rectangle._replace(first_column=kind * self.dim + part.first_column)
                    if self.rule.weight_states and kind == self.rule.weight_states:
                        right, own = right._replace(columns=1), own.view(-1, 1)
                    states.append(Shard(right, own.detach(), writes))
            shape = (self.rows[name], self.dim)
            state_shape = self.rule.state_shape(*shape)
            if tiers is not None and name in self.sharded:
                shards = [shard for shard in self._own if shard.table == name]
                blocks = [RowBlock(shard.first_row, shard.rows, tiers.starts[name]) for shard in shards]
                numbers = slice(self.dim, tiers.store.width)
                state[name] = TableColumns(tiers, shape, blocks, slice(0, self.dim), self.initial[name].description)
                if state_shape is not None:
                    state[f"{name}_state"] = TableColumns(tiers, state_shape, blocks, numbers, {"kind": "zero"})
                continue
            state[name] = Sharded(shape=shape, width=self.dim, shards=weights)
            if state_shape is not None:
                width = self.rule.state_width(self.dim) if self.rule.weight_states else self.dim
                state[f"{name}_state"] = Sharded(shape=state_shape, width=width, shards=states)
        return state
