"""Which rank holds which part of which table: TorchRec's planner, bounded by what the user asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, MachineError
from ..units import size
from .config import DistributedConfig
from .world import World

KINDS = {"row": "row_wise", "column": "column_wise", "table": "table_wise"}
"""Our words and TorchRec's."""
KERNELS = {"device": "fused", "host": "fused_uvm", "cached-host": "fused_uvm_caching"}
LEAST_COLUMNS = 4
"""fbgemm's rows are read four numbers at a time."""
MOST_COLUMNS = 128
"""TorchRec divides no narrower by itself; a table that is narrower is divided among the ranks."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rectangle of a table, on one rank."""

    table: str
    rank: int
    kind: str
    kernel: str
    first_row: int
    rows: int
    first_column: int
    columns: int
    why: str
    remembered: int = 1
    """Numbers that the optimizer keeps of each row of this part; row-wise Adagrad keeps one."""

    @property
    def nbytes(self) -> int:
        """With what the optimizer remembers."""
        return 4 * self.rows * (self.columns + self.remembered)


def require_possible(
    options: DistributedConfig, tables: Mapping[str, int], dim: int, world: World, *, field: str = "model.table_dim"
) -> None:
    """Refuse what TorchRec cannot do here, alike on every rank, before anything is allocated."""
    device = world.device
    for table, kind in options.shardings.items():
        if kind == "row" and not _rows_for_all(tables[table], world.size):
            raise ConfigError(
                f"distributed.sharding {table}=row: {tables[table]} rows do not give each of {world.size} ranks one",
                where={"field": "distributed.sharding"},
                fix=f"{table}=table",
            )
    for table, place in options.placements.items():
        if place != "device" and device != "cuda":
            raise ConfigError(
                f"distributed.placement {table}={place}: host memory beside the device's needs a GPU",
                where={"field": "distributed.placement", "device": device},
                fix=f"{table}=device, which on a CPU is host memory",
            )
        if options.shardings.get(table) == "data-parallel" and place != "device":
            raise ConfigError(
                f"distributed.placement {table}={place}: a data-parallel table is a copy on every device",
                where={"field": "distributed.placement"},
            )
    if dim % LEAST_COLUMNS:
        raise ConfigError(
            f"{field} is {dim}: divided tables want a multiple of {LEAST_COLUMNS}",
            where={"field": field},
        )


def planned(
    module: nn.Module,
    sharder: Any,
    tables: Mapping[str, int],
    ids: Mapping[str, float],
    options: DistributedConfig,
    world: World,
    *,
    batch_size: int,
    memory: int,
) -> Any:
    """TorchRec's plan, found by rank 0 and the same on all. `ids` says how many ids of a table a sample asks for."""
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
    """Whether no rank is left without rows, for which fbgemm has no operator on a CPU. Ranks get blocks of one size."""
    return -(-rows // ranks) * (ranks - 1) < rows


def _allowed(asked: str | None, rows: int, ranks: int) -> list[str]:
    """The planner divides by columns only where that was asked for: row-wise Adagrad then has other numbers than one
    process has, and a run should not learn otherwise because it got more ranks."""
    if asked:
        return [KINDS[asked]]
    return [KINDS["row"], KINDS["table"]] if _rows_for_all(rows, ranks) else [KINDS["table"]]


def _columns(module: nn.Module, ranks: int) -> int:
    """How narrow a column-wise part may get: an even share, but no finer than TorchRec's own rule."""
    dim = int(next(module.parameters()).shape[1])
    share = max(LEAST_COLUMNS, dim // ranks // LEAST_COLUMNS * LEAST_COLUMNS)
    return min(share, MOST_COLUMNS)


def parts_of(plan: Any, options: DistributedConfig) -> list[Part]:
    """A plan as rectangles, in an order that is the same on every rank."""
    words = {kind: word for word, kind in KINDS.items()}
    found = []
    for module in plan.plan.values():
        for table, placed in module.items():
            why = [f"--distributed.{name}" for name, named in _overrides(options) if table in named]
            for shard in placed.sharding_spec.shards:
                found.append(
                    Part(
                        table=table,
                        rank=shard.placement.rank(),
                        kind=words[placed.sharding_type],
                        kernel=placed.compute_kernel,
                        first_row=shard.shard_offsets[0],
                        rows=shard.shard_sizes[0],
                        first_column=shard.shard_offsets[1],
                        columns=shard.shard_sizes[1],
                        why=" and ".join(why) or "planner",
                    )
                )
    return found


def _overrides(options: DistributedConfig) -> list[tuple[str, dict[str, str]]]:
    return [("sharding", options.shardings), ("placement", options.placements)]


def free_memory(world: World) -> int:
    """Bytes that this rank may plan with, the same on every rank."""
    if world.device == "cuda":
        free = int(torch.cuda.mem_get_info()[0])
    else:
        from ..machine import available_bytes

        free = available_bytes() // world.local_size
    return -world.maximum(-free)


def text_of(parts: list[Part]) -> str:
    """The plan as a table to read."""
    rows = table_of(parts)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def table_of(parts: list[Part]) -> list[list[str]]:
    """The plan as rows of text, the first the head."""
    found = [["rank", "table", "kind", "kernel", "rows", "columns", "bytes", "why"]]
    for part in sorted(parts, key=lambda part: (part.rank, part.table, part.first_row, part.first_column)):
        found.append([
            str(part.rank), part.table, part.kind, part.kernel,
            f"{part.first_row:,} to {part.first_row + part.rows - 1:,}",
            f"{part.first_column} to {part.first_column + part.columns - 1}", f"{part.nbytes:,}", part.why,
        ])  # fmt: skip
    return found
