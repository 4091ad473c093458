"""The workloads by name. Importing this room imports no torch."""

from __future__ import annotations

from ..errors import UsageError, closest
from ..execution.workload import Workload
from .dlrm.config import DLRM_WORKLOAD
from .dlrm_v4.config import DLRM_V4
from .micro_dlrm.config import MICRO_DLRM
from .micro_dlrm_dram.config import MICRO_DLRM_DRAM

WORKLOADS: dict[str, Workload] = {
    "micro-dlrm": MICRO_DLRM,
    "micro-dlrm-dram": MICRO_DLRM_DRAM,
    "dlrm": DLRM_WORKLOAD,
    "dlrm-v4": DLRM_V4,
}


def find(name: str) -> Workload:
    if name in WORKLOADS:
        return WORKLOADS[name]
    guess = closest(name, WORKLOADS)
    raise UsageError(
        f"unknown workload {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
        where={"known": ", ".join(WORKLOADS)},
        fix=f"recperf run {guess}" if guess else "recperf list",
    )
