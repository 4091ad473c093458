"""Steady throughput of the default commands: micro-dlrm, dlrm-v4 (its laptop preset) and dlrm.

Each trains on a CPU with at most two threads and, where torch sees a GPU, there too: kernels launched one by one, the
step as a CUDA graph, and as it is by default. A reading is the samples of consecutive training steps, preparing their
batches included, over the wall time between two synchronised moments. Last come the GPU's rates over the CPU's. Exits
with 5 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from _clock import wait
from _rows import record, row
from recperf.execution.workload import Prepared
from recperf.measure.profile import endless
from recperf.plan.calibrate import call_seconds
from recperf.train.device import applied
from recperf.train.graph import GraphStep
from recperf.train.loop import take_step
from recperf.workloads import find

NAMES = ("micro-dlrm", "dlrm-v4", "dlrm")
WARM_UP = 30
GOAL = 3.0
"""Of the default command on a GPU over the same on a CPU."""
GOALS = tuple(f"{name}, cuda default over cpu" for name in ("micro-dlrm", "dlrm-v4"))


def prepared(name: str, device: str, graph: str) -> Prepared:
    workload = find(name)
    config: Any = next(iter(workload.presets.values()))()
    train = replace(config.train, device=device)
    if hasattr(config, "fast"):
        config = replace(config, train=train, fast=replace(config.fast, graph=graph))
    else:
        config = replace(config, train=replace(train, graph=graph))
    return workload.prepare(config)


def rates(ready: Prepared, seconds: float, samples: int) -> tuple[list[float], dict[str, Any]]:
    """Samples a second of so many windows of steps, and what is known about them."""
    device = ready.settings.device
    with applied(ready.settings):
        trial = ready.trial(42)
        recipe = trial.recipe
        recipe.model.train()
        batches = endless(recipe.order, 0)

        def steps(count: int) -> tuple[int, float]:
            wait(device)
            began, trained = perf_counter(), 0
            for _ in range(count):
                trained += take_step(recipe, batches, recipe.steps // 2)[1]
            wait(device)
            return trained, perf_counter() - began

        steps(WARM_UP)
        count = max(5, round(seconds * WARM_UP / steps(WARM_UP)[1]))
        readings = [steps(count) for _ in range(samples)]
    conditions = {
        "device": ready.settings.device_name,
        "threads": ready.settings.threads,
        "batch": readings[0][0] // count,
        "steps": count,
        "graph": isinstance(recipe.whole_step, GraphStep) and not recipe.whole_step.failed,
        "why": ready.settings.reasons["graph"],
    }
    if device.type == "cuda":
        conditions["call_s"] = call_seconds()
    return [trained / elapsed for trained, elapsed in readings], conditions


def goals_missed(rows: list[dict[str, Any]]) -> list[str]:
    slow = [entry for entry in rows if entry["variant"] in GOALS and entry["p50"] < GOAL]
    return [f"{entry['variant']}: {entry['p50']:.3g}, the goal is {GOAL:g}" for entry in slow]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES)
    arguments.add_argument("--threads", type=int, default=2, help="that torch may use, at most")
    arguments.add_argument("--seconds", type=float, default=2.0, help="of a reading")
    arguments.add_argument("--samples", type=int, default=7)
    arguments.add_argument("--dry", action="store_true", help="print, keep no rows")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    variants = [("cpu", "off", "cpu")]
    if torch.cuda.is_available():
        variants += [("cuda eager", "off", "cuda"), ("cuda graph", "on", "cuda"), ("cuda default", "auto", "cuda")]
    rows, kept = list[dict[str, Any]](), 0
    for name in options.workloads:
        measured: dict[str, list[float]] = {}
        for variant, graph, device in variants:
            ready = prepared(name, device, graph)
            measured[variant], conditions = rates(ready, options.seconds, options.samples)
            title = f"{name}, {variant}"
            rows.append(row("default_speed", title, "samples_per_s", "samples/s", measured[variant], conditions))
            print(json.dumps(rows[-1]), flush=True)
        cpu = sorted(measured["cpu"])[len(measured["cpu"]) // 2]
        for variant in list(measured)[1:]:
            ratios = [value / cpu for value in measured[variant]]
            rows.append(row("default_speed", f"{name}, {variant} over cpu", "speed_ratio", "x", ratios, {}))
            print(json.dumps(rows[-1]), flush=True)
        # A workload at a time: a limit on the whole script's time costs only the last one.
        if not options.dry:
            print(f"rows appended to {record(rows[kept:])}", file=sys.stderr)
        kept = len(rows)
    missed = goals_missed(rows)
    for line in missed:
        print(f"goal missed: {line}", file=sys.stderr)
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
