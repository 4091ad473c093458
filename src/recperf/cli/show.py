"""recperf show WORKLOAD"""

from __future__ import annotations

import json
from typing import Any

from ..config import flatten, to_json
from ..execution.workload import Estimate, Workload
from ..measure.cost import Cost
from ..runs.record import CONFIG_SCHEMA
from ..units import number, size
from .options import WorkloadOptions, choose, read_options
from .terminal import print_json, print_text, table


def command(arguments: list[str]) -> int:
    choice = choose(arguments)
    description = """Show config, parameters, FLOPs, bytes and memory of a workload, counted before anything runs.
With --json it prints what `recperf run --config` accepts."""
    options = read_options(WorkloadOptions, choice, verb="show", description=description)
    estimate = choice.workload.estimate(options.values)
    if options.json:
        print_json(as_json(choice.workload, options.values, estimate))
    elif not options.quiet:
        print_text(as_text(choice.workload, options.values, estimate))
    return 0


def as_json(workload: Workload, config: Any, estimate: Estimate) -> dict[str, Any]:
    return {
        "schema": CONFIG_SCHEMA,
        "workload": workload.name,
        "config": to_json(config),
        "estimate": {
            "parameters": {**estimate.parameters, "total": sum(estimate.parameters.values())},
            "table_bytes": estimate.table_bytes,
            "step": {name: vars(cost) for name, cost in {**estimate.step, "total": estimate.total}.items()},
            "memory_bytes": {**estimate.memory, "total": sum(estimate.memory.values())},
        },
    }


def as_text(workload: Workload, config: Any, estimate: Estimate) -> str:
    lines = [f"{workload.name}: {workload.summary}", "", "config"]
    lines += [f"  {name:<28} {_field(value)}" for name, value in flatten(to_json(config)).items()]
    parameters = ", ".join(f"{name} {count:,}" for name, count in estimate.parameters.items())
    lines += ["", f"parameters {sum(estimate.parameters.values()):,} ({parameters})"]
    lines += [f"tables     {size(estimate.table_bytes)}"]
    held = ", ".join(f"{name} {size(count)}" for name, count in estimate.memory.items())
    lines += [f"memory     {size(sum(estimate.memory.values()))} per step ({held})", "", "one training step, counted"]
    rows = [["component", "FLOPs", "bytes", "FLOPs per byte"]]
    rows += [_row(name, cost) for name, cost in {**estimate.step, "total": estimate.total}.items()]
    return "\n".join([*lines, table(rows)])


def _row(name: str, cost: Cost) -> list[str]:
    return [name, number(cost.flops), size(cost.bytes), f"{cost.flops / cost.bytes:.2f}" if cost.bytes else "-"]


def _field(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
