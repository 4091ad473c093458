"""Trains micro-dlrm-dram with its table in files within a limit of memory, and prints what it took, as JSON.

python tests/workloads/train_in_files.py GIB LIMIT_GIB RESIDENT STEPS BATCH FOLDER
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from recperf.models.tiers.config import TablesConfig
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.micro_dlrm_dram import config as dram
from recperf.workloads.micro_dlrm_dram.build import PreparedDram


def resident_bytes() -> int:
    """The memory of this process that is not backed by files, now."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def main(gib: float, limit_gib: float, resident: str, steps: int, batch: int, folder: Path) -> dict[str, Any]:
    # Of all private memory that may be written, also of what was never touched; torch's libraries are not counted.
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit_gib * 2**30), resource.RLIM_INFINITY))
    config = dram.default()
    config = replace(
        config,
        model=replace(config.model, rows=int(gib * 2**30) // (4 * config.model.dim)),
        data=replace(config.data, batches=steps),
        train=replace(config.train, batch_size=batch, epochs=1),
        tables=TablesConfig(placement="file", resident=resident, folder=folder),
    )
    prepared = PreparedDram(config)
    memory, losses, began = [], [], perf_counter()
    with applied(prepared.settings):
        trial = prepared.trial(1)
        batches = trial.recipe.order.batches(0)
        for step in range(steps):
            losses.append(float(take_step(trial.recipe, batches, step)[0]))
            memory.append(resident_bytes())
    tiers = trial.table.tiers
    assert tiers is not None
    files = sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
    return {
        "table_bytes": prepared.table_bytes()[1],
        "cache_bytes": tiers.cache_bytes,
        "file_bytes": files,
        "seconds": perf_counter() - began,
        "memory": memory,
        "losses": losses,
        "traffic": vars(tiers.traffic),
    }


if __name__ == "__main__":
    gib, limit_gib, resident, steps, batch, folder = sys.argv[1:]
    print(json.dumps(main(float(gib), float(limit_gib), resident, int(steps), int(batch), Path(folder))))
