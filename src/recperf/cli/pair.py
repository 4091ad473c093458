"""recperf pair WORKLOAD"""

from __future__ import annotations

from typing import Any

from ..errors import UsageError
from ..measure import peaks as ceilings
from ..runs.report.formats import measuring_cost
from ..units import size
from .options import WorkloadOptions, choose, read_options
from .terminal import Terminal, print_json, table

DESCRIPTION = """Measure the same model with hot and with cold ids. All shapes are equal; only the range of ids differs.
The ratio of the two shows whether memory limits the step."""
Options = WorkloadOptions


def command(arguments: list[str]) -> int:
    choice = choose(arguments, default="micro-dlrm-dram")
    options = read_options(Options, choice, verb="pair", description=DESCRIPTION)
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    terminal.say(f"{choice.workload.name}: the same model with hot and cold ids")
    from ..execution.measuring import measure_pair
    from ..train.device import applied

    prepared = choice.workload.prepare(options.values)
    with applied(prepared.settings):
        peaks = ceilings.require(prepared.settings.threads, terminal.notice)
        pair = measure_pair(prepared, prepared.trial(options.values.seed), peaks)
    if pair is None:
        raise UsageError(
            f"{choice.workload.name} with these ids and tables has no hot and cold variant",
            fix="recperf pair micro-dlrm-dram --tables.placement device",
        )
    terminal.say(as_text(pair))
    if options.json:
        print_json(pair)
    return 0


def as_text(pair: dict[str, Any]) -> str:
    hot, cold = pair["hot"], pair["cold"]
    rows = [["part, ms (p20 to p80)", "hot", "cold", "cold / hot"]]
    cold_parts = {part["name"]: part for part in cold["components"]}
    for part in hot["components"]:
        other = cold_parts.get(part["name"])
        if other:
            rows.append(_row(part["name"], part["ms"], other["ms"]))
    rows.append(_row("step", hot["step_ms"], cold["step_ms"]))
    names = ("hot", "cold")
    touched = ", ".join(f"{name} {size(pair[name]['ids']['touched_bytes'])}" for name in names)
    return "\n".join(
        [
            "",
            table(rows),
            "",
            f"  rows touched in {hot['steps']} steps: {touched}; table {size(cold['ids']['working_set_bytes'])}",
            *(
                f"  measuring costs, {n}: {measuring_cost(pair[n]['overhead']['share'], pair[n]['step_ms'])}"
                for n in names
            ),
            "",
            pair["verdict"],
        ]
    )


def _row(name: str, hot: dict[str, float], cold: dict[str, float]) -> list[str]:
    ratio = f"{cold['p50'] / hot['p50']:.2f}" if hot["p50"] else "-"
    return [name, _spread(hot), _spread(cold), ratio]


def _spread(ms: dict[str, float]) -> str:
    return f"{ms['p50']:.2f} ({ms['p20']:.2f} to {ms['p80']:.2f})"
