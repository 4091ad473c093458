"""The ids of micro-dlrm-dram: virtual ones, or MovieLens through the same table."""

from __future__ import annotations

from ...data.catalogue import load
from ...execution.tables import require_table_memory
from ..micro_dlrm.data import describe
from .config import MicroDLRMDramConfig, estimate


def check(config: MicroDLRMDramConfig) -> str:
    """Check memory and data without training; the line names the data."""
    require_table_memory(config.tables, estimate(config))
    if config.data.ids == "movielens":
        return describe(load(config.data))
    return f"{config.data.ids} ids from a space of {config.data.id_space:,} (synthetic)"
