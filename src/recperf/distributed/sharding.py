"""How TorchRec shards tables: its planner bounded by the user's options, and what single-row tables (tables.py) and
pooled tables (bags.py) have in common.

Shapes: R rows of a table, D width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, MachineError
from ..units import size
from .config import DistributedConfig
from .exchange import Prefetch
from .world import World

KINDS = {"row": "row_wise", "column": "column_wise", "table": "table_wise"}
"""The names of the option, and TorchRec's."""
KERNELS = {"device": "fused", "host": "fused_uvm", "cached-host": "fused_uvm_caching"}
LEAST_COLUMNS = 4
"""fbgemm reads rows four numbers at a time."""
MOST_COLUMNS = 128
"""The narrowest column shard that TorchRec makes by itself; a narrower table is divided evenly."""


@dataclass(frozen=True, kw_only=True)
class Part:
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
    state_width: int = 1
    """Numbers that the optimizer keeps per row of this part; row-wise Adagrad keeps one."""

    @property
    def nbytes(self) -> int:
        """Rows and optimizer state."""
        return 4 * self.rows * (self.columns + self.state_width)


def require_possible(
    options: DistributedConfig, tables: Mapping[str, int], dim: int, world: World, *, field: str = "model.table_dim"
) -> None:
    """Fail on every rank, before anything is allocated, if TorchRec cannot do what was requested."""
    device = world.device
    for table, kind in options.shardings.items():
        if kind == "row" and not _rows_for_all(tables[table], world.size):
            raise ConfigError(
                f"distributed.sharding {table}=row: {tables[table]} rows are too few for {world.size} ranks",
                where={"field": "distributed.sharding"},
                fix=f"{table}=table",
            )
    for table, place in options.placements.items():
        if place != "device" and device != "cuda":
            raise ConfigError(
                f"distributed.placement {table}={place}: a table in host memory needs a GPU",
                where={"field": "distributed.placement", "device": device},
                fix=f"{table}=device; on a CPU that is host memory",
            )
        if options.shardings.get(table) == "data-parallel" and place != "device":
            raise ConfigError(
                f"distributed.placement {table}={place}: a data-parallel table is copied to every device",
                where={"field": "distributed.placement"},
            )
    if dim % LEAST_COLUMNS:
        raise ConfigError(
            f"{field} is {dim}: sharded tables need a multiple of {LEAST_COLUMNS}",
            where={"field": field},
        )


def make_plan(
    module: nn.Module,
    sharder: Any,
    tables: Mapping[str, int],
    ids: Mapping[str, float],
    options: DistributedConfig,
    world: World,
    *,
    batch_size: int,
) -> Any:
    """TorchRec's plan, made by rank 0 and the same on all. `ids` is the number of ids per sample, by table."""
    from torch import distributed
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.types import PlannerError

    constraints = {
        name: ParameterConstraints(
            sharding_types=_allowed(options.shardings.get(name), rows, world.size),
            compute_kernels=[KERNELS[options.placements.get(name, "device")]],
            min_partition=_columns(module, world.size),
            pooling_factors=[ids[name]],
        )
        for name, rows in tables.items()
    }
    memory = free_memory(world)
    room = {"hbm_cap" if world.device == "cuda" else "ddr_cap": memory}
    topology = Topology(world_size=world.size, local_world_size=world.local_size, compute_device=world.device, **room)
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=max(1, batch_size // world.size), constraints=constraints
    )
    try:
        return planner.collective_plan(module, [sharder], distributed.group.WORLD)
    except PlannerError as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        raise MachineError(
            f"the tables do not fit {world.size} ranks of {size(memory)}: {first}",
            fix="more ranks, a smaller --model.row-scale, or other --distributed.sharding",
        ) from None


def _rows_for_all(rows: int, ranks: int) -> bool:
    """Whether every rank gets rows: fbgemm has no CPU operator for an empty shard. Ranks get blocks of one size."""
    return -(-rows // ranks) * (ranks - 1) < rows


def _allowed(requested: str | None, rows: int, ranks: int) -> list[str]:
    """The planner shards by columns only on request: row-wise Adagrad then has a state per shard, and a run should not
    train differently because it got more ranks."""
    if requested:
        return [KINDS[requested]]
    return [KINDS["row"], KINDS["table"]] if _rows_for_all(rows, ranks) else [KINDS["table"]]


def _columns(module: nn.Module, ranks: int) -> int:
    """The narrowest column shard: an even share, but at most TorchRec's own limit."""
    dim = int(next(module.parameters()).shape[1])
    share = max(LEAST_COLUMNS, dim // ranks // LEAST_COLUMNS * LEAST_COLUMNS)
    return min(share, MOST_COLUMNS)


def parts_of(plan: Any, options: DistributedConfig) -> list[Part]:
    """A plan as shards, in an order that is the same on every rank."""
    names = {kind: name for name, kind in KINDS.items()}
    overrides = {"sharding": options.shardings, "placement": options.placements}
    parts = []
    for module in plan.plan.values():
        for table, placed in module.items():
            why = [f"--distributed.{name}" for name, tables in overrides.items() if table in tables]
            for shard in placed.sharding_spec.shards:
                parts.append(
                    Part(
                        table=table,
                        rank=shard.placement.rank(),
                        kind=names[placed.sharding_type],
                        kernel=placed.compute_kernel,
                        first_row=shard.shard_offsets[0],
                        rows=shard.shard_sizes[0],
                        first_column=shard.shard_offsets[1],
                        columns=shard.shard_sizes[1],
                        why=" and ".join(why) or "planner",
                    )
                )
    return parts


def free_memory(world: World) -> int:
    """Free bytes per rank for the plan: the smallest of all ranks."""
    if world.device == "cuda":
        free = int(torch.cuda.mem_get_info()[0])
    else:
        from ..machine import available_bytes

        free = available_bytes() // world.local_size
    return -world.maximum(-free)


def plan_text(parts: list[Part]) -> str:
    """The plan as a table of text."""
    rows = plan_rows(parts)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def plan_rows(parts: list[Part]) -> list[list[str]]:
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
    """Tables of one width that TorchRec shards among the ranks: single rows (EmbeddingCollection), or `pooled` sums of
    rows (EmbeddingBagCollection). With no tables at all it does nothing."""

    def __init__(
        self,
        tables: Mapping[str, int],
        dim: int,
        options: DistributedConfig,
        world: World,
        *,
        pooled: bool,
        optimizer: str,
        eps: float,
        ids: Mapping[str, float],
        batch_size: int,
        device: torch.device,
        keyed: Callable[[Any], Any],
    ) -> None:
        """`optimizer` is fbgemm's name of it; `keyed` makes a KeyedJaggedTensor of a batch."""
        self.names, self.world, self.parts = tuple(tables), world, list[Part]()
        self._prefix = "embedding_bags" if pooled else "embeddings"
        self._model: Any = None
        if not tables:
            return
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        fused = {"optimizer": getattr(EmbOptimType, optimizer), "eps": eps, "learning_rate": 0.0}
        module, sharder = _collection(tables, dim, options, pooled=pooled, fused=fused)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = make_plan(module, sharder, tables, ids, options, world, batch_size=batch_size)
            self._model = _shard(module, sharder, plan, device)
        self.parts = parts_of(plan, options)
        self._prefetch = Prefetch(self._model.module, keyed, device)

    def __bool__(self) -> bool:
        return self._model is not None

    def follow(self, batch: Any) -> None:
        """Announce the batch after the next one: its ids are sent while that one is computed."""
        if self:
            self._prefetch.follow(batch)

    def lookup(self, batch: Any) -> Any:
        """TorchRec's dictionary or keyed tensor of rows; with gradients enabled it is a training step's."""
        return self._prefetch.lookup(batch, training=torch.is_grad_enabled())

    def send_ahead(self) -> None:
        """Send the ids of the announced batch, where `lookup` did not."""
        if self:
            self._prefetch.send_ahead()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next update: fbgemm reads it in the lookup whose backward pass is the update."""
        if self:
            for group in self._model.fused_optimizer.param_groups:
                group["lr"] = rate
            self._model.fused_optimizer.step()

    def local(self) -> list[tuple[Part, Tensor, Tensor | None]]:
        """This rank's shards, their rows, and the optimizer's state: one number per row, one per weight, or None."""
        if not self:
            return []
        weights, states = self._model.state_dict(), self._model.fused_optimizer.state_dict()["state"]
        shards = []
        for part in (part for part in self.parts if part.rank == self.world.rank):
            key = f"{self._prefix}.{part.table}.weight"
            held = weights[key].local_shards()
            state = states.get(key, {}).get(f"{part.table}.momentum1")
            place = [part.first_row, part.first_column]
            index = [list(shard.metadata.shard_offsets) for shard in held].index(place)
            shards.append((part, held[index].tensor, None if state is None else state.local_shards()[index].tensor))
        return shards


def _collection(
    tables: Mapping[str, int], dim: int, options: DistributedConfig, *, pooled: bool, fused: dict[str, Any]
) -> tuple[nn.Module, Any]:
    """TorchRec's collection of tables, not allocated yet, and its sharder; `fused` configures fbgemm's optimizer."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    config, collection, base = (
        (EmbeddingBagConfig, EmbeddingBagCollection, EmbeddingBagCollectionSharder)
        if pooled
        else (EmbeddingConfig, EmbeddingCollection, EmbeddingCollectionSharder)
    )

    class Sharder(base):  # type: ignore[misc, valid-type]  # it has no types
        def sharding_types(self, compute_device_type: str) -> list[str]:
            """Row-wise too: TorchRec offers it for GPUs only, but it works on CPUs as well."""
            return list(KINDS.values())

    configs = [
        config(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[name]) for name, rows in tables.items()
    ]
    module = collection(device=torch.device("meta"), tables=configs)
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
    # Around the collection alone: it would wrap dense parameters in DDP, whose gradients are means, one message per
    # bucket; ours are sums that are sent in one buffer with the loss and the signals.
    return DistributedModelParallel(
        module, device=device, plan=plan, sharders=[sharder], init_data_parallel=False, init_parameters=False
    )
