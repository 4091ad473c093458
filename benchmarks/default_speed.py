"""Steady throughput of the default commands: micro-dlrm, dlrm-v4 (its laptop preset) and dlrm.

Each trains on a CPU with at most two threads and, where torch sees a GPU, there too: kernels launched one by one, the
step as a CUDA graph, as it is by default, and dlrm with every switch off. Beside steps on a GPU stand the seconds in
which its host calls an operator and how many a step calls, by which plan_validate.py predicts them. A reading is the
samples of consecutive training steps, preparing their batches included, over the wall time between two synchronised
moments. Last come the GPU's rates over the CPU's. Exits with 5 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from _clock import wait
from _rows import record, row
from recperf.execution.clocked_steps import endless
from recperf.execution.workload import Prepared, Workload
from recperf.planning.calibrate import call_seconds
from recperf.train.config import PLAIN
from recperf.train.device import applied
from recperf.train.graph import GraphStep
from recperf.train.loop import take_step
from recperf.workloads import find

NAMES = ("micro-dlrm", "dlrm-v4", "dlrm")
WAYS = {
    "cpu": ("cpu", "off"),
    "cuda eager": ("cuda", "off"),
    "cuda graph": ("cuda", "on"),
    "cuda default": ("cuda", "auto"),
    "cuda plain": ("cuda", "off"),
}
"""Device and graph of each way."""
WARM_UP = 30
GOAL = 3.0
"""Of the default command on a GPU over the same on a CPU."""
GOALS = tuple(f"{name}, cuda default over cpu" for name in ("micro-dlrm", "dlrm-v4"))


def config_of(workload: Workload, way: str) -> Any:
    """The first preset of a workload in a way; None: it has no switches."""
    device, graph = WAYS[way]
    config: Any = next(iter(workload.presets.values()))()
    train = replace(config.train, device=device)
    if hasattr(config, "fast"):
        return replace(config, train=train, fast=PLAIN if way == "cuda plain" else replace(config.fast, graph=graph))
    return None if way == "cuda plain" else replace(config, train=replace(train, graph=graph))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that are called."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operator(*args, **(kwargs or {}))


def rates(ready: Prepared, seconds: float, samples: int) -> tuple[list[float], dict[str, Any]]:
    """Samples a second of so many windows of steps, and what is known about them."""
    device, host = ready.settings.device, dict[str, Any]()
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
        if device.type == "cuda":
            host["call_s"] = call_seconds()
            with Operators() as operators:  # type: ignore[no-untyped-call]
                steps(1)
            host["operators"] = operators.count
            began = perf_counter()
            for _ in range(WARM_UP):
                next(batches)
            host["input_ms"] = 1e3 * (perf_counter() - began) / WARM_UP
    conditions = {
        "device": ready.settings.device_name,
        "threads": ready.settings.threads,
        "batch": readings[0][0] // count,
        "steps": count,
        "graph": isinstance(recipe.whole_step, GraphStep) and not recipe.whole_step.failed,
        "why": ready.settings.reasons["graph"],
        **host,
    }
    return [trained / elapsed for trained, elapsed in readings], conditions


def goals_missed(rows: list[dict[str, Any]]) -> list[str]:
    slow = [entry for entry in rows if entry["variant"] in GOALS and entry["p50"] < GOAL]
    return [f"{entry['variant']}: {entry['p50']:.3g}, the goal is {GOAL:g}" for entry in slow]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES)
    arguments.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="those with cuda on a GPU")
    arguments.add_argument("--threads", type=int, default=2, help="that torch may use, at most")
    arguments.add_argument("--seconds", type=float, default=2.0, help="of a reading")
    arguments.add_argument("--samples", type=int, default=7)
    arguments.add_argument("--dry", action="store_true", help="print, keep no rows")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    ways = [way for way in options.ways if way == "cpu" or torch.cuda.is_available()]
    rows, recorded = list[dict[str, Any]](), 0
    for name in options.workloads:
        measured: dict[str, list[float]] = {}
        for way in ways:
            if (config := config_of(find(name), way)) is None:
                continue
            measured[way], conditions = rates(find(name).prepare(config), options.seconds, options.samples)
            rows.append(row("default_speed", f"{name}, {way}", "samples_per_s", "samples/s", measured[way], conditions))
            print(json.dumps(rows[-1]), flush=True)
        cpu = sorted(measured.pop("cpu", ()))
        for way, readings in measured.items() if cpu else ():
            ratios = [value / cpu[len(cpu) // 2] for value in readings]
            rows.append(row("default_speed", f"{name}, {way} over cpu", "speed_ratio", "x", ratios, {}))
            print(json.dumps(rows[-1]), flush=True)
        # A workload at a time: a limit on the whole script's time costs only the last one.
        if not options.dry:
            print(f"rows appended to {record(rows[recorded:])}", file=sys.stderr)
        recorded = len(rows)
    missed = goals_missed(rows)
    for line in missed:
        print(f"goal missed: {line}", file=sys.stderr)
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
