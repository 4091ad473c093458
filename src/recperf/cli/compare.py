"""recperf compare OLD NEW"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from ..errors import GateFailed, UsageError
from ..runs.compare import Comparison, compare, parse_gate
from ..runs.report.blocks import render, render_block
from ..runs.report.formats import component, time
from ..runs.sides import load
from ..terminal import conclude, print_text
from .parse import JsonOption, VerboseOption, parse

DESCRIPTION = """Show what changed from one run, profile or trace to another: of runs config and quality, and of all
what got slower or faster, by part of the step, operator and kernel. A difference in time counts only if the ranges from
p20 to p80 over the steps do not overlap."""


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, VerboseOption):
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="OLD NEW")] = ()
    """Folders of runs; profile.json files or folders that hold one; or traces (.json, .json.gz) of torch.profiler."""
    gate: str | None = None
    """Exit 5 if the step, or a part of at least 5% of it, got slower by more than this percentage, such as 5%. Of two
    runs, their profiles are compared."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf compare", description=DESCRIPTION)
    if len(options.paths) != 2:
        what = f"compare takes two runs, profiles or traces; got {len(options.paths)}"
        raise UsageError(what, fix="recperf compare OLD NEW")
    gate = parse_gate(options.gate) if options.gate is not None else None
    comparison = compare(*map(load, options.paths))
    if gate is not None and not comparison.same_model:
        what = "these are runs of different models, whose steps are different work: --gate has nothing to hold"
        raise UsageError(what, fix="recperf compare OLD NEW, without --gate")
    slower = comparison.regressions(gate) if gate is not None else []
    error = failure(comparison, gate) if gate is not None else None
    if options.json:
        checked = None if gate is None else {"limit": gate, "beyond": [change.name for change in slower]}
        return conclude(error, {**msgspec.to_builtins(comparison), "gate": checked})
    from ..runs.compare_report import ROWS, report, times

    lines = [render(report(comparison), verbose=options.verbose)]
    if not options.verbose and comparison.same_model:
        lines += render_block(times(comparison, ROWS // 2 if comparison.quality else ROWS))
    if gate is not None and error is None:
        lines.append(f"gate: nothing got slower by more than {gate * 100:.4g}%")
    print_text("\n".join(lines))
    return conclude(error)


def failure(comparison: Comparison, gate: float) -> GateFailed | None:
    """The parts that exceed the gate; None if none does."""
    slower = comparison.regressions(gate)
    if not slower:
        return None
    listed = ", ".join(f"{component(change.name)} {change.text}" for change in slower)
    where: dict[str, object] = {
        component(change.name): f"{time(change.old_ms.p50)} -> {time(change.new_ms.p50)}"
        for change in slower
        if change.old_ms and change.new_ms
    }
    return GateFailed(f"slower by more than the gate of {gate * 100:.4g}%: {listed}", where=where)
