"""recperf pair WORKLOAD"""

from __future__ import annotations

from ..errors import UsageError
from ..measure import peaks as ceilings
from ..measure.profile_records import Pair
from ..measure.records import Percentiles
from ..runs.report.formats import spread, time
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


def as_text(pair: Pair) -> str:
    arms = {"hot": pair.hot, "cold": pair.cold}
    rows = [["part, p50 (p20 – p80)", "hot", "cold", "cold / hot"]]
    cold_parts = {part.name: part for part in pair.cold.components}
    for part in pair.hot.components:
        if other := cold_parts.get(part.name):
            rows.append(_row(part.name, part.ms, other.ms))
    rows.append(_row("step", pair.hot.step_ms, pair.cold.step_ms))
    touched = ", ".join(f"{name} {size(arm.ids.touched_bytes)}" for name, arm in arms.items())
    return "\n".join(
        [
            "",
            table(rows),
            "",
            f"  rows touched in {pair.hot.steps} steps: {touched}; table {size(pair.cold.ids.working_set_bytes)}",
            "",
            pair.verdict,
        ]
    )


def _row(name: str, hot: Percentiles, cold: Percentiles) -> list[str]:
    times = [f"{time(ms.p50)} ({spread(ms)})" for ms in (hot, cold)]
    return [name, *times, f"{cold.p50 / hot.p50:.2f}" if hot.p50 else "-"]
