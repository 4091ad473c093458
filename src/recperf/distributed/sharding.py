"""TorchRec's collections of tables that are sharded among ranks: it sends ids and rows, and each rank looks up its own
(local_rows.py). And what ranks cannot do, and have no memory for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import ConfigError, MachineError
from ..machine import available_bytes
from ..models.tiers.config import Tiers
from ..ops.table_rules import RULES, RuleName
from ..train.device import free_gpu_bytes
from ..units import size
from .config import Demand, DistributedConfig, Table
from .placement import LEAST_COLUMNS, Placed, TableShard
from .ranks import Ranks

KINDS = {"row": "row_wise", "column": "column_wise", "table": "table_wise"}
"""The names of the option, and TorchRec's."""


def require_possible(
    placed: Sequence[Placed],
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
    if sharded and world.device == "cpu" and not RULES[optimizer].fbgemm_on_cpu:
        raise ConfigError(
            f"train.optimizer is {optimizer}, which FBGEMM has on a GPU only",
            where={"field": "train.optimizer", "device": world.device},
            fix="--distributed.sharding data-parallel, or --train.optimizer rowwise-adagrad",
        )
    dim = placed[0].table.dim
    if sharded and dim % LEAST_COLUMNS:
        raise ConfigError(
            f"{field} is {dim}: sharded tables need a multiple of {LEAST_COLUMNS}",
            where={"field": field},
        )


def require_room(placed: Sequence[Placed], demand: Demand, device: str, free: int) -> None:
    """Fail if the shards of a rank, and what it sends of them, do not fit into its free bytes on the device."""
    held_R = np.sum([one.held_R(demand.batch) for one in placed], axis=0)
    rank = int(held_R.argmax())
    if held_R[rank] + demand.other_bytes > free:
        beside = f" and {size(demand.other_bytes)} beside it" if demand.other_bytes else ""
        place = "on the GPU" if device == "cuda" else "in host memory"
        raise MachineError(
            f"the tables do not fit {len(held_R)} ranks: rank {rank} needs {size(held_R[rank])} for its part{beside}, "
            f"but {size(free)} are free {place}",
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
