"""A few training steps of a saved config and nothing else: what a profiler that slows everything down may watch.

python -m recperf.workloads.few_steps CONFIG
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

STEPS = 4


def main(path: Path) -> None:
    from ..config import from_json
    from ..runs.record import read_config
    from ..train.device import applied
    from ..train.loop import take_step
    from . import find

    name, values = read_config(path)
    workload = find(name)
    config: Any = from_json(workload.config, values)
    prepared = workload.prepare(config)
    with applied(prepared.settings):
        recipe = prepared.trial(config.seed).recipe
        batches = recipe.order.batches(0)
        for step in range(min(STEPS, len(recipe.order))):
            take_step(recipe, batches, step)
        if prepared.settings.sync:
            prepared.settings.sync()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
