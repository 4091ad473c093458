"""micro-dlrm-dram's lookups against row width and against MLP width: linear in the one, flat in the other."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from _rows import record, row, show
from recperf.distributed.ranks import current
from recperf.execution.measuring import open_window
from recperf.execution.sweep import line
from recperf.train.device import applied
from recperf.workloads.micro_dlrm_dram.build import PreparedDram
from recperf.workloads.micro_dlrm_dram.config import MicroDLRMDramConfig, default

STEPS = 16


def lookups_ms(config: MicroDLRMDramConfig) -> list[float]:
    """Milliseconds of the embedding part of each of some steps."""
    prepared = PreparedDram(config)
    with applied(prepared.settings):
        trial = prepared.trial(config.seed)
        window = open_window(prepared, trial, trial.recipe, current().window())
        window.warm(4)
        window.take(STEPS)
    return [parts["embedding"] / 1e6 for _, parts in window.clocked]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> int:
    base = default()
    entries, dims, times = [], [], []
    for dim in (64, 128, 256, 512):
        readings = lookups_ms(replace(base, model=replace(base.model, dim=dim)))
        dims.append(float(dim))
        times.append(median(readings))
        entries.append(
            row("dram_sweep", f"dim {dim}", "embedding", "ms", readings, {"dim": dim, "rows": base.model.rows})
        )
    _, _, r2 = line(dims, times)
    entries.append(row("dram_sweep", "dim 64 to 512", "r2 of the line", "", [r2], {"points": len(dims)}))
    plain, doubled = [], []
    for _ in range(3):
        plain += lookups_ms(base)
        doubled += lookups_ms(replace(base, model=replace(base.model, bottom=(16, 16, 16), top=(64, 32, 1))))
    change = median(doubled) / median(plain) - 1
    conditions = {"mlps": "bottom 16-8-8 to 16-16-16, top 32-16-1 to 64-32-1", "threads": torch.get_num_threads()}
    entries.append(row("dram_sweep", "MLP widths doubled", "embedding moves by", "", [change], conditions))
    for entry in entries:
        print(show(entry))
    print(f"rows appended to {record(entries).name}")
    return 0 if r2 >= 0.95 and abs(change) < 0.15 else 5


if __name__ == "__main__":
    sys.exit(main())
