"""Where the tables of a workload go on a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..distributed.ranks import current
from ..errors import MachineError
from ..machine import available_bytes
from ..models.tiers.config import TablesConfig, Tiers, decide
from ..units import size
from .workload import SMALLER, Estimate, require_memory

if TYPE_CHECKING:
    import torch

    from ..distributed.config import DistributedConfig
    from ..planning.work import PlannedWorkload


def place_tables(
    tables: TablesConfig,
    counted: Estimate,
    *,
    device: str,
    device_free: int | None,
    share: float = 1.0,
) -> Tiers:
    """Where the tables go on a device with `device_free` free bytes; None: with whatever a GPU will have. Each rank has
    a `share` of them."""
    needed = counted.table_bytes + counted.state_bytes
    others = (sum(counted.memory.values()) - needed) // current().size
    host_free = max(0, available_bytes() // current().local_size - (0 if device == "cuda" else others))
    needed, rows = round(share * needed), round(share * counted.table_rows)
    tiers = decide(
        tables, needed, device=device, device_free=device_free, host_free=host_free, rows=rows, others=others
    )
    return replace(tiers, options=tables)


def placed_tables(tables: TablesConfig, counted: Estimate, device: torch.device, *, share: float = 1.0) -> Tiers:
    """Where the tables go on a device of this machine; each rank has a `share` of them."""
    from ..train.device import free_gpu_bytes

    world = current()
    host_free = available_bytes() // world.local_size
    free = free_gpu_bytes(device) if device.type == "cuda" else host_free
    tiers = place_tables(tables, counted, device=device.type, device_free=free, share=share)
    whole = round(share * (counted.table_bytes + counted.state_bytes))
    in_host = tiers.index_bytes + (whole if tiers.placement == "host" else 0)
    if in_host > host_free:
        parts = f"tables of {size(whole)} and their index" if tiers.placement == "host" else "the index of the tables"
        raise MachineError(
            f"{parts} need {size(in_host)} of host memory, {size(host_free)} are free",
            fix="--tables.placement file" if tiers.index_bytes <= host_free else SMALLER,
        )
    why = tiers.why + (f"; the share of one of {world.size} ranks" if world.size > 1 else "")
    if tiers.placement == "file":
        why += f"; up to {size(whole)} in files, {size(tables.free_disk())} of disk are free"
    return replace(tiers, why=why)


def require_table_memory(
    tables: TablesConfig, counted: Estimate, *, share: float = 1.0, more: int = 0, fix: str = SMALLER
) -> None:
    """`require_memory` for tables that go to files where they do not fit, unless they were requested in memory."""
    if tables.placement in ("device", "host"):
        require_memory(counted, tables=share, more=more, fix=fix)
    else:
        free = available_bytes() // current().local_size
        tiers = place_tables(tables, counted, device="cpu", device_free=free, share=share)
        more += tiers.cache_bytes + tiers.index_bytes - counted.state_bytes
        require_memory(counted, tables=0.0, more=more, fix=fix)


def table_share(planned: PlannedWorkload, options: DistributedConfig, *, on_host: bool) -> float:
    """Share of all table weights on the fullest rank; `on_host`: of a rank on the fullest host, on average."""
    world = current()
    if world.size == 1:
        return 1.0
    import numpy as np

    from ..distributed.placement import placed_by
    from ..planning.memory import rank_demand

    placed = placed_by(options, rank_demand(planned, world.size, options), world.size)
    together = world.local_size if on_host else 1
    held_R = np.sum([one.weight_R for one in placed], axis=0)
    held = np.add.reduceat(held_R, range(0, world.size, together)).max() / together
    return float(held / sum(one.table.bytes for one in placed))
