"""The workloads by name. Importing this room imports no torch."""

from __future__ import annotations

from ..errors import UsageError, closest
from ..execution.workload import Workload, load

WORKLOADS = {
    "micro-dlrm": "recperf.workloads.micro_dlrm.config:MICRO_DLRM",
    "micro-dlrm-dram": "recperf.workloads.micro_dlrm_dram.config:MICRO_DLRM_DRAM",
    "dlrm": "recperf.workloads.dlrm.config:DLRM",
    "dlrm-v4": "recperf.workloads.dlrm_v4.config:DLRM_V4",
}
"""One line per workload: where its `Workload` object is defined."""


def find(name: str) -> Workload:
    if name in WORKLOADS:
        workload: Workload = load(WORKLOADS[name])
        return workload
    guess = closest(name, WORKLOADS)
    raise UsageError(
        f"unknown workload {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
        where={"known": ", ".join(WORKLOADS)},
        fix=f"recperf run {guess}" if guess else "recperf list",
    )
