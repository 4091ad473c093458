"""recperf compare OLD NEW"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro

from ..errors import GateFailed, UsageError
from ..measure.records import Percentiles
from ..runs import compare as timing
from ..runs.compare import Comparison, TimeChange
from ..runs.evidence import Evidence, kind_of
from ..runs.report.blocks import columns, fact_lines, render
from ..runs.report.formats import NONE, component, count, percent, short, spread, time
from .parse import JsonOption, VerboseOption, parse
from .terminal import conclude, print_text

DESCRIPTION = """Show what changed from one run, profile or trace to another. Runs: config, quality, step time, step
budget, limit; several are compared with the first. Profiles and traces: what got slower or faster, by part of the step,
operator and kernel. A difference in time counts only if the ranges from p20 to p80 over the steps do not overlap."""
MOST = 6
"""Changes that are shown of all groups together, beside that of the step."""


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, VerboseOption):
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="OLD NEW")] = ()
    """Folders of runs; profile.json files or folders that hold one; or traces (.json, .json.gz) of torch.profiler."""
    gate: str | None = None
    """Exit 5 if the step, or a part of at least 5% of it, got slower by more than this percentage, such as 5%. Of two
    runs, their profiles are compared."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf compare", description=DESCRIPTION)
    runs = len(options.paths) >= 2 and {kind_of(path) for path in options.paths} == {"run"}
    if len(options.paths) != 2 and not (runs and options.gate is None):
        what = "compare takes two runs, profiles or traces, or several runs without --gate"
        raise UsageError(f"{what}; got {len(options.paths)}", fix="recperf compare OLD NEW")
    gate = timing.parse_gate(options.gate) if options.gate is not None else None
    texts: list[str] = []
    report: dict[str, Any] = {}
    error = None
    if runs:
        from ..runs.report.compare import compare, comparison_report

        runs_compared = compare([Evidence(folder) for folder in options.paths])
        texts.append(render(comparison_report(runs_compared), verbose=options.verbose))
        report = msgspec.to_builtins(runs_compared)
    if not runs or gate is not None:
        old, new = options.paths
        comparison = timing.compare(timing.load(old), timing.load(new))
        error = failure(comparison, gate)
        texts.append(as_text(comparison, options.verbose))
        checked = None if gate is None else {"limit": gate, "beyond": [c.name for c in comparison.regressions(gate)]}
        report |= {**msgspec.to_builtins(comparison), "gate": checked}
    if gate is not None and error is None:
        texts.append(f"gate: nothing got slower by more than {gate * 100:.4g}%")
    if not options.json:
        print_text("\n\n".join(texts))
    return conclude(error, report if options.json else None)


def failure(comparison: Comparison, gate: float | None) -> GateFailed | None:
    """The parts that exceed the gate; None if none does."""
    beyond = comparison.regressions(gate) if gate is not None else []
    if gate is None or not beyond:
        return None
    listed = ", ".join(f"{component(change.name)} {change.text}" for change in beyond)
    where: dict[str, object] = {
        component(change.name): f"{time(change.old_ms.p50)} -> {time(change.new_ms.p50)}"
        for change in beyond
        if change.old_ms and change.new_ms
    }
    return GateFailed(f"slower by more than the gate of {gate * 100:.4g}%: {listed}", where=where)


def as_text(comparison: Comparison, verbose: bool) -> str:
    """The step, what limits it, and what changed most; with `verbose` every change."""
    clear = {
        group: [change for change in changes if change.says not in ("within noise", "same")]
        for group, changes in comparison.groups.items()
    }
    alike = sum(map(len, comparison.groups.values())) - sum(map(len, clear.values()))
    most = None if verbose else MOST // max(1, sum(map(bool, clear.values())))
    rows = [_row(comparison.step, "step")]
    for group, changes in clear.items():
        rows += [_row(change, component(change.name) if group == "parts" else change.name) for change in changes[:most]]
    hidden = 1 + sum(map(len, clear.values())) - len(rows)
    head = ["per step", "before", "p20 – p80", "after", "p20 – p80", "difference", "change", ""]
    lines = [" -> ".join(comparison.files)]
    lines += fact_lines([("warning", "; ".join(comparison.warnings))] if comparison.warnings else [])
    lines += fact_lines([("note", "; ".join(comparison.notes))] if comparison.notes else [])
    lines += columns([head, *rows], left=(7,), shorten_first=True)
    lines.append(f"  {alike} the same or within noise" + (f"; {hidden} more differ: --verbose" if hidden else ""))
    if comparison.shares:
        old, new = (limit or "unclear" for limit in comparison.limits)
        shares = list(comparison.shares.items())[: None if verbose else 3]
        listed = ", ".join(f"{limit} {percent(before)} → {percent(after)}" for limit, (before, after) in shares)
        lines += fact_lines([("limit", f"{f'{old} in both' if old == new else f'{old} → {new}'}: {listed}")])
    return "\n".join(lines + [f"  {group}: {why}" for group, why in comparison.missing.items() if verbose])


def _row(change: TimeChange, name: str) -> list[str]:
    cells = []
    for ms in (change.old_ms, change.new_ms):
        known = msgspec.convert(ms, Percentiles, from_attributes=True) if ms and ms.p20 is not None else None
        cells += [time(ms.p50) if ms else NONE, spread(known) if known else NONE]
    more = f"{'+' if change.difference_ms >= 0 else '-'}{time(abs(change.difference_ms))}"
    says = change.says
    if change.old_count != change.new_count and None not in (change.old_count, change.new_count):
        says += f", {count(change.old_count)} then {count(change.new_count)} calls"
    return [short(name, 60), *cells, more, change.text if change.change is not None else NONE, says]
