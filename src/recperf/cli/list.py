"""recperf list"""

from __future__ import annotations

from ..workloads import find, names
from .parse import JsonOption, parse
from .terminal import print_json, print_text


def command(arguments: list[str]) -> int:
    options = parse(JsonOption, arguments, prog="recperf list", description="The workloads and their presets.")
    if options.json:
        rows = [{"name": w.name, "summary": w.summary, "presets": list(w.presets)} for w in map(find, names())]
        print_json({"workloads": rows})
        return 0
    for workload in map(find, names()):
        print_text(f"{workload.name}\n  {workload.summary}\n  presets: {', '.join(workload.presets)}")
    print_text("\nrecperf show WORKLOAD shows what it would do; recperf run WORKLOAD trains it.")
    return 0
