"""Tables that are sharded among ranks: TorchRec sends ids and rows, and each rank looks up its own. FBGEMM holds these
and updates them, on the device or in a cache of those in use. And what ranks cannot do, and have no memory for.

Shapes: R rows of this rank's shards one after the other, S slots of a cache, V ids that arrived, U distinct rows among
them, F tables, M bags of each table, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError, MachineError
from ..machine import available_bytes
from ..models.tiers.cache import TieredRows
from ..models.tiers.config import Tiers
from ..models.tiers.opening import open_tiers
from ..ops.lookup import unique
from ..ops.table_rules import RULES, RuleName, TableRule
from ..train.device import free_gpu_bytes
from ..units import size
from .config import Demand, DistributedConfig, Table
from .placement import LEAST_COLUMNS, ShardPlacement, TableShard
from .ranks import Ranks

KINDS = {"row": "row_wise", "column": "column_wise", "table": "table_wise"}
"""The names of the option, and TorchRec's."""


def require_possible(
    placed: Sequence[ShardPlacement],
    world: Ranks,
    *,
    optimizer: RuleName = "rowwise-adagrad",
    field: str = "model.table_dim",
    tiers: Tiers,
) -> None:
    """Fail on every rank, before anything is allocated, if ranks cannot do what was requested."""
    for one in placed:
        if tiers.placement != "device" and one.kind not in ("row", "table"):
            raise ConfigError(
                f"distributed.sharding {one.table.name}={one.kind}: rows in tiers ({tiers.why}) are sharded by row or "
                "table",
                where={"field": "distributed.sharding"},
                fix=f"{one.table.name}=row, or --tables.placement device",
            )
    sharded = any(one.kind != "data-parallel" for one in placed)
    able = [name for name, rule in RULES.items() if rule.fbgemm and (rule.fbgemm_on_cpu or world.device == "cuda")]
    if sharded and optimizer not in able:
        device = "GPU" if world.device == "cuda" else "CPU"
        raise ConfigError(
            f"the optimizer of the tables is {optimizer}, which FBGEMM does not have on a {device}, but "
            f"{', '.join(able)}",
            where={"field": "distributed.sharding", "device": world.device},
            fix="--distributed.sharding data-parallel, or another optimizer",
        )
    rule = RULES[optimizer]
    if rule.row_states and rule.weight_states and any(one.kind == "column" for one in placed):
        raise ConfigError(
            f"the optimizer of the tables is {optimizer}, whose number of a row is not divided by columns",
            where={"field": "distributed.sharding"},
            fix="--distributed.sharding row, or another optimizer",
        )
    dim = placed[0].table.dim
    if sharded and dim % LEAST_COLUMNS:
        raise ConfigError(
            f"{field} is {dim}: sharded tables need a multiple of {LEAST_COLUMNS}",
            where={"field": field},
        )


def require_room(placed: Sequence[ShardPlacement], demand: Demand, device: str, free: int) -> None:
    """Fail if the shards of a rank, and what it sends of them, do not fit into its free bytes on the device."""
    held_R = np.sum([one.held_R(demand.batch) for one in placed], axis=0)
    rank = int(held_R.argmax())
    if held_R[rank] + demand.other_bytes > free:
        beside = f" and {size(demand.other_bytes)} beside it" if demand.other_bytes else ""
        where = "on the GPU" if device == "cuda" else "in host memory"
        raise MachineError(
            f"the tables do not fit {len(held_R)} ranks: rank {rank} needs {size(held_R[rank])} for its part{beside}, "
            f"but {size(free)} are free {where}",
            fix="--tables.placement file, more ranks or a smaller batch; recperf plan lists options that fit",
        )


def free_memory(world: Ranks, device: torch.device) -> dict[str, int]:
    """Free bytes of a rank on its host and on its device: the smallest of all ranks."""
    free = {"cpu": available_bytes() // world.local_size}
    if device.type == "cuda":
        free["cuda"] = free_gpu_bytes(device)
    return {name: -world.maximum(-bytes_) for name, bytes_ in free.items()}


def collection(
    tables: Sequence[Table],
    shards: Sequence[TableShard],
    options: DistributedConfig,
    device: torch.device,
    lookup: Callable[[Sequence[str]], nn.Module],
) -> Any:
    """TorchRec's sharded collection, which sends ids to the ranks that have their rows, and rows back. What is between,
    `lookup` makes for tables that are sharded in the same way, in the order of their ids."""
    from torchrec.distributed import comm_ops
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.distributed.types import (
        EmbeddingModuleShardingPlan,
        EnumerableShardingSpec,
        ParameterSharding,
        ShardingEnv,
        ShardMetadata,
    )
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    pooled = tables[0].pooled
    config, whole = (EmbeddingBagConfig, EmbeddingBagCollection) if pooled else (EmbeddingConfig, EmbeddingCollection)
    base: Any = ShardedEmbeddingBagCollection if pooled else ShardedEmbeddingCollection

    class Collection(base):  # type: ignore[misc]  # it has no types
        def _create_lookups(self) -> None:
            for sharding in self._embedding_shardings if pooled else self._sharding_type_to_sharding.values():
                groups = sharding._grouped_embedding_configs
                self._lookups.append(lookup([table.name for group in groups for table in group.embedding_tables]))

        def _initialize_torch_state(self, *_: Any) -> None:
            """The collection has no rows of its own."""

    def sharding(table: str) -> Any:
        own = [shard for shard in shards if shard.table == table]
        metadata = [
            ShardMetadata(
                shard_offsets=[shard.first_row, shard.first_column],
                shard_sizes=[shard.rows, shard.columns],
                placement=f"rank:{shard.rank}/{device}",
            )
            for shard in own
        ]
        ranks = [shard.rank for shard in own]
        return ParameterSharding(KINDS[own[0].kind], "fused", ranks, EnumerableShardingSpec(metadata))

    configs = [
        config(name=one.name, embedding_dim=one.dim, num_embeddings=one.rows, feature_names=[one.name])
        for one in tables
    ]
    plan = EmbeddingModuleShardingPlan({one.name: sharding(one.name) for one in tables})
    environment = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    # A loss here is already weighted by each rank's samples, so gradients are sums, not means over the ranks.
    comm_ops.set_gradient_division(False)
    unsharded = whole(device=torch.device("meta"), tables=configs)
    return Collection(unsharded, plan, environment, {}, device, qcomm_codecs_registry=codecs(options))


def codecs(options: DistributedConfig) -> Any:
    """How rows and gradients are encoded when sent; None sends them as they are."""
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
    from torchrec.distributed.types import CommOp

    if options.all_to_all == "fp32":
        return None
    # TorchRec's own registry replaces bf16 by fp16 on a CPU, with a warning; here the requested precision is sent.
    precision = CommType(options.all_to_all)
    codec = QCommsConfig(forward_precision=precision, backward_precision=precision)
    operations = (
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    )
    return {operation.name: get_qcomm_codecs(codec) for operation in operations}


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
        """The memory of `count` rows: weights, and the states of the optimizer."""
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        cuda = self.device.type == "cuda"
        on_gpu, on_cpu = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA), (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self._table: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(count, self.width, *(on_gpu if cuda else on_cpu))],
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

    def sums(self, rows_V: Tensor, offsets: Tensor) -> Tensor:
        """The sums of bags of rows, whose backward pass updates the rows."""
        if self.rule.counts:
            # A step has several lookups, and those of an evaluation count there too.
            self._table.iter.fill_(self.updates)
            self._table.iter_cpu.fill_(self.updates)
        sums: Tensor = self._table(rows_V, offsets)
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
        """The numbers on this rank of the rows of ids that arrived, and what is to be called when they were used:
        in tiers they are slots until then. None, unless `required`, where the batch before leaves too few slots."""
        if self.rows is None:
            return ids, _nothing
        tiers, finish = self.rows.tiers, _nothing
        counts_F = ids.lengths().view(len(self.names), -1).sum(1)
        rows_V = ids.values() + self.starts_F.repeat_interleave(counts_F, output_size=ids.values().numel())
        if tiers is not None:
            began, distinct = perf_counter(), unique(rows_V)
            place = tiers.place if required else tiers.try_place
            placed = place(distinct.values_U, object())
            tiers.waited(perf_counter() - began)
            if placed is None:
                return None
            rows_V, finish = placed.index_N[distinct.inverse_N], partial(tiers.finish, placed)
        return type(ids)(ids.keys(), rows_V, lengths=ids.lengths(), stride=ids.stride()), finish

    def forward(self, placed: Any) -> Tensor:
        """Single rows, V x D, or the sums of bags, M x FD."""
        rows_V, bags = placed.values(), placed.stride()
        if self.rows is None or (not self.pooled and not rows_V.numel()):
            # FBGEMM has no operator for nothing at all.
            return torch.zeros(bags if self.pooled else 0, 0, device=self.device, requires_grad=True)
        if not self.pooled:
            return self.rows.sums(rows_V, torch.arange(len(rows_V) + 1, device=self.device))
        sums = self.rows.sums(rows_V, placed.offsets())
        return sums.view(len(self.names), bags, -1).transpose(0, 1).reshape(bags, -1)
