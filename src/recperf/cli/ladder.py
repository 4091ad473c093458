"""recperf ladder WORKLOAD"""

from __future__ import annotations

from typing import Any

from ..errors import GateFailed, UsageError
from .options import WorkloadOptions, choose, read_options
from .peaks import at_hand
from .terminal import Terminal, print_json, table

DESCRIPTION = """Ways to make the table of micro-dlrm-dram faster: each alone against the plain way, with the gain
predicted from counted work and this machine's ceilings, the gain measured, and a check that the numbers are equal."""


def command(words: list[str]) -> int:
    choice = choose(words, default="micro-dlrm-dram")
    if choice.workload.name != "micro-dlrm-dram":
        raise UsageError(f"{choice.workload.name} has no ladder", fix="recperf ladder micro-dlrm-dram")
    options = read_options(WorkloadOptions, choice, verb="ladder", description=DESCRIPTION)
    if options.values.data.ids == "movielens":
        raise UsageError("the ladder needs virtual ids", fix="--data.ids uniform or zipf")
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    terminal.say("climbing: three copies of the table, the plain way and each rung in turn")
    peaks = at_hand(terminal)
    from ..workloads.micro_dlrm_dram.build import PreparedDram
    from ..workloads.micro_dlrm_dram.ladder import climb

    found = climb(PreparedDram(options.values), peaks)
    terminal.say(as_text(found))
    if options.json:
        print_json(found)
    wrong = [rung["name"] for rung in found["rungs"] if not rung["equal"]]
    if wrong:
        raise GateFailed(f"numbers differ beyond tolerance: {', '.join(wrong)}")
    return 0


def as_text(found: dict[str, Any]) -> str:
    rows = [["rung", "against", "predicted", "measured", "p20 to p80", "difference", "idea"]]
    for rung in found["rungs"]:
        measured = rung["measured"]
        rows.append(
            [
                rung["name"],
                rung["against"],
                f"{rung['predicted']:.2f} x",
                f"{measured['p50']:.2f} x",
                f"{measured['p20']:.2f} to {measured['p80']:.2f}",
                f"{rung['difference']:.0e}" + ("" if rung["equal"] else " NOT EQUAL"),
                rung["idea"],
            ]
        )
    plain = found["plain_ms"]
    head = (
        f"\nthe plain way: lookup {plain['lookup']:.1f} ms (torch's EmbeddingBag), update {plain['update']:.1f} ms; "
        f"{found['lookups']:,} lookups of {found['row_bytes']} B a batch, {found['unique_rows']:,} different; "
        f"{found['batches']} batches, the first left out\n"
    )
    return head + "\n" + table(rows)
