"""recperf pair WORKLOAD"""

from __future__ import annotations

from ..errors import UsageError
from ..measure import peaks as ceilings
from ..runs.report.blocks import render_block
from ..runs.report.run_report import pair_blocks
from ..terminal import Terminal, print_json
from .options import WorkloadOptions, choose, read_options

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
    terminal.say("\n".join(line for block in pair_blocks(pair) for line in render_block(block)))
    if options.json:
        print_json(pair)
    return 0
