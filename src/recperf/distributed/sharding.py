"""How TorchRec shards tables: its planner with the placement of `placement.py`, and what single-row tables (tables.py)
and pooled tables (bags.py) have in common.

Shapes: R rows of a table, D width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError, MachineError
from ..ops.table_rules import RULES, RuleName, TableRule
from ..train.device import free_gpu_bytes
from ..units import size
from .config import Demand, DistributedConfig, Table
from .exchange import Prefetch
from .placement import LEAST_COLUMNS, Placed
from .ranks import Ranks

KINDS = {"row": "row_wise", "column": "column_wise", "table": "table_wise"}
"""The names of the option, and TorchRec's."""
KERNELS = {"device": "fused", "host": "fused_uvm", "cached-host": "fused_uvm_caching"}


@dataclass(frozen=True, kw_only=True)
class TableShard:
    """A shard: a rectangle of a table, on one rank."""

    table: str
    rank: int
    kind: str
    kernel: str
    first_row: int
    rows: int
    first_column: int
    columns: int
    why: str
    state_width: int
    """Numbers that the optimizer keeps per row of this part; row-wise Adagrad keeps one."""

    @property
    def nbytes(self) -> int:
        """Rows and optimizer state."""
        return 4 * self.rows * (self.columns + self.state_width)


def require_possible(
    options: DistributedConfig,
    placed: Sequence[Placed],
    world: Ranks,
    *,
    optimizer: RuleName = "rowwise-adagrad",
    field: str = "model.table_dim",
) -> None:
    """Fail on every rank, before anything is allocated, if TorchRec cannot do what was requested."""
    sharded = any(one.kind != "data-parallel" for one in placed)
    if sharded and world.device == "cpu" and not RULES[optimizer].fbgemm_on_cpu:
        raise ConfigError(
            f"train.optimizer is {optimizer}, which FBGEMM has on a GPU only",
            where={"field": "train.optimizer", "device": world.device},
            fix="--distributed.sharding data-parallel, or --train.optimizer rowwise-adagrad",
        )
    kinds = {one.table.name: one.kind for one in placed}
    for table, place in options.placements.items():
        if place != "device" and world.device != "cuda":
            raise ConfigError(
                f"distributed.placement {table}={place}: a table in host memory needs a GPU",
                where={"field": "distributed.placement", "device": world.device},
                fix=f"{table}=device; on a CPU that is host memory",
            )
        if kinds[table] == "data-parallel" and place != "device":
            raise ConfigError(
                f"distributed.placement {table}={place}: a data-parallel table is copied to every device",
                where={"field": "distributed.placement"},
            )
    dim = placed[0].table.dim
    if sharded and dim % LEAST_COLUMNS:
        raise ConfigError(
            f"{field} is {dim}: sharded tables need a multiple of {LEAST_COLUMNS}",
            where={"field": field},
        )


def make_plan(
    module: nn.Module,
    sharder: Any,
    placed: Sequence[Placed],
    demand: Demand,
    options: DistributedConfig,
    *,
    local_size: int,
    device: str,
    memory: Mapping[str, int],
) -> Any:
    """TorchRec's plan with our kinds and ranks; `memory` has the free bytes of a rank, on its host and on its GPU. The
    plan depends only on the arguments, so that every rank makes the same."""
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import PlannerError

    ranks = len(placed[0].width_R)
    constraints = {
        one.table.name: ParameterConstraints(
            sharding_types=[KINDS[one.kind]],
            compute_kernels=[KERNELS[options.placements.get(one.table.name, "device")]],
            min_partition=int(one.width_R.max()),
            pooling_factors=[_ids_a_sample(one.table, demand.batch)],
        )
        for one in placed
    }
    room = {**memory, device: memory[device] - demand.other_bytes}
    partitioner = _partitioner(placed, demand, device)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks,
            local_world_size=local_size,
            compute_device=device,
            hbm_cap=room.get("cuda"),
            ddr_cap=room.get("cpu"),
        ),
        batch_size=demand.batch,
        constraints=constraints,
        partitioner=partitioner,
        # What is not for tables was subtracted already.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
    )
    try:
        return planner.plan(module, [sharder])
    except PlannerError as error:
        problem = partitioner.problem or next((line for line in str(error).splitlines() if line.strip()), "")
        raise MachineError(
            f"the tables do not fit {ranks} ranks: {problem}",
            fix="more ranks, a smaller batch or --model.row-scale; recperf plan lists options that fit",
        ) from None


def _ids_a_sample(table: Table, batch: int) -> float:
    """Ids that a rank sends for each of its samples: all those of bags, else every distinct one once."""
    return table.ids if table.pooled else table.sent_vectors(batch) / batch


def _partitioner(placed: Sequence[Placed], demand: Demand, device: str) -> Any:
    """Gives the shards of TorchRec's planner to the ranks of our placement, if each has room for them."""
    from torchrec.distributed.planner.types import Partitioner, PlannerError, Storage

    by_name = {one.table.name: one for one in placed}

    class PlacedPartitioner(Partitioner):  # type: ignore[misc]  # it has no types
        problem = ""

        def partition(self, proposal: list[Any], storage_constraint: Any) -> list[Any]:
            used = [Storage(hbm=0, ddr=0) for _ in storage_constraint.devices]
            for option in proposal:
                one = by_name[option.name]
                on_device = device == "cuda" and option.compute_kernel == KERNELS["device"]
                for shard, rank in zip(option.shards, np.flatnonzero(one.width_R).tolist(), strict=True):
                    shard.rank = rank
                    # The planner knows nothing of the state of fbgemm's optimizers.
                    state = int(one.state_R()[rank])
                    used[rank] += shard.storage + Storage(hbm=state * on_device, ddr=state * (not on_device))
            for rank, (need, has) in enumerate(zip(used, storage_constraint.devices)):
                for place, own, free, other in (
                    ("on the GPU", need.hbm, has.storage.hbm, demand.other_bytes),
                    ("in host memory", need.ddr, has.storage.ddr, demand.other_bytes * (device == "cpu")),
                ):
                    if own > free:
                        beside = f" and {size(other)} beside it" if other else ""
                        needs = f"rank {rank} needs {size(own)} for its part{beside}"
                        self.problem = f"{needs}, but {size(free + other)} are free {place}"
                        raise PlannerError(self.problem)
            return proposal

    return PlacedPartitioner()


def shards_of(placed: Sequence[Placed], options: DistributedConfig) -> list[TableShard]:
    """The shards of tables, by table and rank. TorchRec's plan has the same; of a data-parallel table each rank has a
    copy."""
    shards = []
    for one in placed:
        table, row, column = one.table.name, 0, 0
        kernel = "copy" if one.kind == "data-parallel" else KERNELS[options.placements.get(table, "device")]
        why = f"{one.why} and --distributed.placement" if table in options.placements else one.why
        rows_R, state_width_R = one.rows_R.tolist(), one.state_width_R.tolist()
        for rank in np.flatnonzero(one.width_R).tolist():
            rows, columns = rows_R[rank], int(one.width_R[rank])
            shards.append(
                TableShard(
                    table=table, rank=rank, kind=one.kind, kernel=kernel, first_row=row, rows=rows,
                    first_column=column, columns=columns, why=why, state_width=state_width_R[rank],
                )
            )  # fmt: skip
            row += rows if one.kind == "row" else 0
            column += columns if one.kind == "column" else 0
    return shards


def free_memory(world: Ranks) -> dict[str, int]:
    """Free bytes per rank for the plan, on its host and on its GPU: the smallest of all ranks."""
    from ..machine import available_bytes

    free = {"cpu": available_bytes() // world.local_size}
    if world.device == "cuda":
        free["cuda"] = free_gpu_bytes()
    return {device: -world.maximum(-bytes_) for device, bytes_ in free.items()}


def plan_text(parts: list[TableShard]) -> str:
    rows = plan_rows(parts)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def plan_rows(parts: list[TableShard]) -> list[list[str]]:
    """The plan as rows of text; the first is the header."""
    rows = [["rank", "table", "kind", "kernel", "rows", "columns", "bytes", "why"]]
    for part in sorted(parts, key=lambda part: (part.rank, part.table, part.first_row, part.first_column)):
        rows.append([
            str(part.rank), part.table, part.kind, part.kernel,
            f"{part.first_row:,} to {part.first_row + part.rows - 1:,}",
            f"{part.first_column} to {part.first_column + part.columns - 1}", f"{part.nbytes:,}", part.why,
        ])  # fmt: skip
    return rows


class ShardedTables:
    """Tables of one width that TorchRec shards among the ranks: single rows (EmbeddingCollection), or sums of rows
    (EmbeddingBagCollection). With no tables at all it does nothing."""

    def __init__(
        self,
        placed: Sequence[Placed],
        demand: Demand,
        options: DistributedConfig,
        world: Ranks,
        *,
        rule: TableRule,
        eps: float,
        device: torch.device,
        keyed: Callable[[Any], Any],
    ) -> None:
        """`keyed` makes a KeyedJaggedTensor of a batch."""
        self.rule, self.world, self.names = rule, world, tuple(one.table.name for one in placed)
        self.parts = shards_of(placed, options)
        self._model: Any = None
        if not placed:
            return
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        self._prefix = "embedding_bags" if placed[0].table.pooled else "embeddings"
        fused = {"optimizer": getattr(EmbOptimType, rule.fbgemm), "eps": eps, "learning_rate": 0.0}
        module, sharder = collection([one.table for one in placed], options, fused)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = make_plan(
                module, sharder, placed, demand, options,
                local_size=world.local_size, device=world.device, memory=free_memory(world),
            )  # fmt: skip
            self._model = _shard(module, sharder, plan, device)
        self._prefetch = Prefetch(self._model.module, keyed, device)

    def __bool__(self) -> bool:
        return self._model is not None

    def follow(self, batch: Any, ready: Any = None) -> None:
        """Announce the batch after the next one: its ids are sent while that one is computed."""
        if self:
            self._prefetch.follow(batch, ready)

    def lookup(self, batch: Any) -> Any:
        """TorchRec's dictionary or keyed tensor of rows; with gradients enabled it is a training step's."""
        return self._prefetch.lookup(batch, training=torch.is_grad_enabled())

    def send_ahead(self) -> None:
        """Send the ids of the announced batch, where `lookup` did not."""
        if self:
            self._prefetch.send_ahead()

    def set_rate(self, rate: float, updates: int) -> None:
        """Set the learning rate of the next update, and the number of updates before it: fbgemm reads them in the
        lookup whose backward pass is the update."""
        if self and self.rule.counts:
            for module in self._model.modules():
                if hasattr(module, "iter_cpu"):
                    # Lookups of an evaluation count there too.
                    module.iter.fill_(updates)
                    module.iter_cpu.fill_(updates)
        if self:
            for group in self._model.fused_optimizer.param_groups:
                group["lr"] = rate
            self._model.fused_optimizer.step()

    def local(self) -> list[tuple[TableShard, Tensor, list[Tensor]]]:
        """This rank's shards, their rows, and the optimizer's states: each has a number per row or per weight."""
        if not self:
            return []
        weights, states = self._model.state_dict(), self._model.fused_optimizer.state_dict()["state"]
        shards = []
        for part in (part for part in self.parts if part.rank == self.world.rank):
            key = f"{self._prefix}.{part.table}.weight"
            held = weights[key].local_shards()
            own = [states[key][f"{part.table}.{name}"] for name in self.rule.fbgemm_states]
            place = [part.first_row, part.first_column]
            index = [list(shard.metadata.shard_offsets) for shard in held].index(place)
            shards.append((part, held[index].tensor, [state.local_shards()[index].tensor for state in own]))
        return shards


def collection(tables: Sequence[Table], options: DistributedConfig, fused: dict[str, Any]) -> tuple[nn.Module, Any]:
    """TorchRec's collection of tables, not allocated yet, and its sharder; `fused` configures fbgemm's optimizer."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    config, module_type, base = (
        (EmbeddingBagConfig, EmbeddingBagCollection, EmbeddingBagCollectionSharder)
        if tables[0].pooled
        else (EmbeddingConfig, EmbeddingCollection, EmbeddingCollectionSharder)
    )

    class Sharder(base):  # type: ignore[misc, valid-type]  # it has no types
        def sharding_types(self, compute_device_type: str) -> list[str]:
            """Row-wise too: TorchRec offers it for GPUs only, but it works on CPUs as well."""
            return list(KINDS.values())

    configs = [
        config(name=one.name, embedding_dim=one.dim, num_embeddings=one.rows, feature_names=[one.name])
        for one in tables
    ]
    module = module_type(device=torch.device("meta"), tables=configs)
    return module, Sharder(fused_params=fused, qcomm_codecs_registry=codecs(options))


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


def _shard(module: nn.Module, sharder: Any, plan: Any, device: torch.device) -> Any:
    from torchrec.distributed import comm_ops
    from torchrec.distributed.model_parallel import DistributedModelParallel

    # A loss here is already weighted by each rank's samples, so gradients are sums, not means over the ranks.
    comm_ops.set_gradient_division(False)
    # Around the collection alone: it would wrap dense parameters in DDP, whose gradients are means; ours are sums
    # (step.py).
    return DistributedModelParallel(
        module, device=device, plan=plan, sharders=[sharder], init_data_parallel=False, init_parameters=False
    )
