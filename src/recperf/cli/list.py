"""recperf list"""

from __future__ import annotations

from ..workloads import find, names
from .parse import JsonOption, parse
from .terminal import print_json


def command(arguments: list[str]) -> int:
    options = parse(JsonOption, arguments, prog="recperf list", description="The workloads and their presets.")
    if options.json:
        rows = [{"name": w.name, "summary": w.summary, "presets": list(w.presets)} for w in map(find, names())]
        print_json({"workloads": rows})
        return 0
    for workload in map(find, names()):
        print(f"{workload.name}\n  {workload.summary}\n  presets: {', '.join(workload.presets)}")
    print("\nrecperf show WORKLOAD shows what it would do; recperf run WORKLOAD trains it.")
    return 0
