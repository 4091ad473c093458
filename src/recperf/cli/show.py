"""recperf show [WORKLOAD]"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config import flatten, to_json
from ..execution.tables import place_tables
from ..execution.workload import Estimate, Workload
from ..machine import available_bytes
from ..runs.record import CONFIG_SCHEMA
from ..terminal import print_json, print_text, table
from ..units import number, size
from ..workloads import find, names
from .options import WorkloadOptions, choose, read_options

DESCRIPTION = """Show config, parameters, FLOPs, bytes and memory of a workload, counted before anything runs. With
--json it prints what `recperf run --config` accepts. Without any argument it lists the workloads and their presets."""
Options = WorkloadOptions


def command(arguments: list[str]) -> int:
    if not set(arguments) - {"--json"}:
        return list_workloads(as_json=bool(arguments))
    choice = choose(arguments)
    options = read_options(Options, choice, verb="show", description=DESCRIPTION)
    estimate = choice.workload.estimate(options.values)
    if options.json:
        print_json(as_json(choice.workload, options.values, estimate))
    elif not options.quiet:
        print_text(as_text(choice.workload, options.values, estimate))
    return 0


def list_workloads(*, as_json: bool) -> int:
    workloads = list(map(find, names()))
    if as_json:
        print_json(
            {"workloads": [{"name": w.name, "summary": w.summary, "presets": list(w.presets)} for w in workloads]}
        )
        return 0
    for workload in workloads:
        print_text(f"{workload.name}\n  {workload.summary}\n  presets: {', '.join(workload.presets)}")
    print_text("\nrecperf show WORKLOAD shows what it would do; recperf run WORKLOAD trains it.")
    return 0


def as_json(workload: Workload, config: Any, estimate: Estimate) -> dict[str, Any]:
    return {
        "schema": CONFIG_SCHEMA,
        "workload": workload.name,
        "config": to_json(config),
        "estimate": {
            "parameters": {**estimate.parameters, "total": sum(estimate.parameters.values())},
            "table_bytes": estimate.table_bytes,
            "state_bytes": estimate.state_bytes,
            "tables": placed(config, estimate),
            "step": {name: vars(cost) for name, cost in {**estimate.step, "total": estimate.total}.items()},
            "memory_bytes": {**estimate.memory, "total": sum(estimate.memory.values())},
        },
    }


def placed(config: Any, estimate: Estimate) -> dict[str, str | None] | None:
    """Where the tables of a single process go, and why; the placement is None where it depends on the free memory of a
    GPU, which only torch tells. None for a workload without the choice."""
    tables, train = getattr(config, "tables", None), config.train
    if tables is None:
        return None
    whole = size(estimate.table_bytes + estimate.state_bytes)
    cuda = train.device == "cuda" or (train.device == "auto" and Path("/dev/nvidia0").exists())
    if "adamw" in (getattr(train, "optimizer", None), getattr(train, "table_optimizer", None)):
        return {"placement": "device", "why": "device: adamw changes every row in every step"}
    if tables.placement == "auto" and cuda and not tables.device_bytes:
        why = f"device if {whole} fit into the free memory of the GPU, else host or file; decided by the run"
        return {"placement": None, "why": why}
    free = None if cuda else available_bytes()
    tiers = place_tables(tables, estimate, device="cuda" if cuda else "cpu", device_free=free)
    return {"placement": tiers.placement, "why": tiers.why}


def as_text(workload: Workload, config: Any, estimate: Estimate) -> str:
    lines = [f"{workload.name}: {workload.summary}", "", "config"]
    for name, value in flatten(to_json(config)).items():
        shown = " ".join(map(str, value)) if isinstance(value, list) else json.dumps(value)
        lines.append(f"  {name:<28} {value if isinstance(value, str) else shown}")
    parameters = ", ".join(f"{name} {count:,}" for name, count in estimate.parameters.items())
    lines += ["", f"parameters {sum(estimate.parameters.values()):,} ({parameters})"]
    state = f", their optimizer state {size(estimate.state_bytes)}" if estimate.state_bytes else ""
    lines += [f"tables     {size(estimate.table_bytes)}{state}"]
    where = placed(config, estimate)
    if where is not None:
        lines += [f"placement  {where['why']}"]
    held = ", ".join(f"{name} {size(count)}" for name, count in estimate.memory.items())
    lines += [f"memory     {size(sum(estimate.memory.values()))} per step ({held})", "", "one training step, counted"]
    rows = [["component", "FLOPs", "bytes", "FLOPs per byte"]]
    for name, cost in {**estimate.step, "total": estimate.total}.items():
        intensity = f"{cost.flops / cost.bytes:.2f}" if cost.bytes else "-"
        rows.append([name, number(cost.flops), size(cost.bytes), intensity])
    return "\n".join([*lines, table(rows)])
