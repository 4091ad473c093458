"""recperf ladder WORKLOAD"""

from __future__ import annotations

from typing import Any

from ..errors import GateFailed, UsageError
from .options import WorkloadOptions, choose, read_options
from .peaks import stored_or_measured
from .terminal import Terminal, print_json, table

DESCRIPTION = """Try optimisations of the table of micro-dlrm-dram, each against the plain implementation: the range
of gains predicted from counted work and readings of this machine, the measured gain, and whether the results are equal.
The conclusion names predictions that failed."""


def command(arguments: list[str]) -> int:
    choice = choose(arguments, default="micro-dlrm-dram")
    if choice.workload.name != "micro-dlrm-dram":
        raise UsageError(f"{choice.workload.name} has no ladder", fix="recperf ladder micro-dlrm-dram")
    options = read_options(WorkloadOptions, choice, verb="ladder", description=DESCRIPTION)
    if options.values.data.ids == "movielens":
        raise UsageError("the ladder needs synthetic ids", fix="--data.ids uniform or zipf")
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    terminal.say("measuring with three copies of the table: the plain implementation and each optimisation in turn")
    from ..train.device import applied
    from ..workloads.micro_dlrm_dram.build import PreparedDram
    from ..workloads.micro_dlrm_dram.ladder import climb

    prepared = PreparedDram(options.values)
    if prepared.settings.device.type != "cpu":
        raise UsageError("the ladder is about a CPU's memory", fix="--train.device cpu")
    with applied(prepared.settings):
        ladder = climb(prepared, stored_or_measured(terminal, prepared.settings.threads))
    terminal.say(as_text(ladder))
    if options.json:
        print_json(ladder)
    wrong = [rung["name"] for rung in ladder["rungs"] if not rung["equal"]]
    if wrong:
        raise GateFailed(f"results differ beyond tolerance: {', '.join(wrong)}")
    return 0


def as_text(ladder: dict[str, Any]) -> str:
    rows = [["optimisation", "against", "predicted", "measured", "p20 to p80", "difference", "idea"]]
    for rung in ladder["rungs"]:
        measured = rung["measured"]
        rows.append(
            [
                rung["name"],
                rung["against"],
                f"{rung['predicted']['low']:.2f} to {rung['predicted']['high']:.2f} x"
                + (" FAILED" if rung["as_predicted"] is False else ""),
                f"{measured['p50']:.2f} x",
                f"{measured['p20']:.2f} to {measured['p80']:.2f}",
                f"{rung['difference']:.0e}" + ("" if rung["equal"] else " NOT EQUAL"),
                rung["idea"],
            ]
        )
    plain = ladder["plain_ms"]
    head = (
        f"\nplain implementation: lookup {plain['lookup']:.1f} ms (torch's EmbeddingBag), update "
        f"{plain['update']:.1f} ms; "
        f"{ladder['lookups']:,} lookups of {ladder['row_bytes']} B per batch, {ladder['unique']:,} distinct; "
        f"{ladder['batches']} batches, without the first\n"
    )
    return f"{head}\n{table(rows)}\n\n{ladder['conclusion']}"
