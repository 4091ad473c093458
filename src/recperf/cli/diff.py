"""recperf diff PROFILE PROFILE"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import GateFailed, UsageError
from ..runs.profile_diff import Change, Diff, Kernel, change_text, diff, load, parse_gate
from ..runs.report.formats import NONE, component, count, percent, short, spread, time
from ..runs.report.text import columns
from .parse import JsonOption, parse
from .terminal import conclude, print_text

DESCRIPTION = """Show what got slower or faster from the first profile to the second, by part of the step and by kernel.
Exits 5 if --gate is given and the step, or a part of at least 5% of it, got slower by more than the gate and the ranges
from p20 to p80 do not overlap."""

TOP = 12


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    profiles: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PROFILE PROFILE")] = ()
    """Two profile.json files, or folders that hold one: of recperf profile or of any run."""
    gate: str | None = None
    """Exit 5 if something got slower by more than this percentage, such as 5%."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf diff", description=DESCRIPTION)
    if len(options.profiles) != 2:
        raise UsageError(f"diff needs two profiles, got {len(options.profiles)}", fix="recperf diff OLD NEW")
    gate = parse_gate(options.gate) if options.gate is not None else None
    old, new = (load(path) for path in options.profiles)
    difference = diff(old, new)
    error = failure(difference, gate)
    if options.json:
        checked = None if gate is None else {"limit": gate, "beyond": [c.name for c in difference.regressions(gate)]}
        return conclude(error, {**difference.as_json(), "gate": checked})
    print_text(as_text(difference))
    if gate is not None and error is None:
        print_text(f"\ngate: nothing got slower by more than {gate * 100:.4g}%")
    return conclude(error)


def failure(difference: Diff, gate: float | None) -> GateFailed | None:
    """The parts that exceed the gate; None if none does."""
    beyond = difference.regressions(gate) if gate is not None else []
    if gate is None or not beyond:
        return None
    listed = ", ".join(f"{component(change.name)} {change_text(change)}" for change in beyond)
    where: dict[str, object] = {
        component(change.name): f"{time(change.old['p50'])} -> {time(change.new['p50'])}"
        for change in beyond
        if change.old and change.new
    }
    return GateFailed(f"slower by more than the gate of {gate * 100:.4g}%: {listed}", where=where)


def as_text(difference: Diff) -> str:
    lines = [f"{difference.files[0]} -> {difference.files[1]}"]
    lines += [f"WARNING: {text}" for text in difference.warnings]
    lines += [f"note: {text}" for text in difference.notes]
    rows = [["", "before", "p20 – p80", "after", "p20 – p80", "change", ""]]
    rows.append(_row("step", difference.step))
    rows += [_row(component(change.name), change) for change in difference.components]
    lines += ["", "step and parts, the largest change first", *columns(rows, left=(6,))]
    lines += _limits(difference)
    lines += ["", "kernels", *_kernels(difference)]
    return "\n".join(lines)


def _limits(difference: Diff) -> list[str]:
    if not difference.shares:
        return []
    old, new = (limit or "unclear" for limit in difference.limits)
    named = f"{old} in both" if old == new else f"{old}, then {new}"
    rows = [["", "before", "after"]]
    rows += [[limit, percent(before), percent(after)] for limit, (before, after) in difference.shares.items()]
    return ["", f"what limits the step: {named}", *columns(rows)]


def _row(name: str, change: Change) -> list[str]:
    cells = []
    for ms in (change.old, change.new):
        cells += [time(ms["p50"]), spread(ms)] if ms else [NONE, NONE]
    return [short(name, 30), *cells, change_text(change) if change.ratio is not None else NONE, change.says]


def _kernels(difference: Diff) -> list[str]:
    if difference.no_kernels:
        return [f"  {difference.no_kernels}"]
    groups = (
        ("in both", [k for k in difference.kernels if k.old_ms is not None and k.new_ms is not None and k.more_ms]),
        ("gone", [k for k in difference.kernels if k.new_ms is None]),
        ("new", [k for k in difference.kernels if k.old_ms is None]),
    )
    rows = [["", "before", "after", "difference", "count before", "after"]]
    lines = []
    for title, kernels in groups:
        if kernels:
            rows += [[f"{title}:", "", "", "", "", ""], *(_kernel(kernel) for kernel in kernels[:TOP])]
            rows += [[f"  and {len(kernels) - TOP} more", *[""] * 5]] if len(kernels) > TOP else []
    if len(rows) > 1:
        lines += columns(rows, shorten_first=True)
    same = sum(1 for k in difference.kernels if k.old_ms is not None and k.new_ms is not None and not k.more_ms)
    return [*lines, *([f"  {same} take the same time in both"] if same else [])] or ["  none in either"]


def _kernel(kernel: Kernel) -> list[str]:
    more = f"{'+' if kernel.more_ms > 0 else '-'}{time(abs(kernel.more_ms))}"
    counts = [count(kernel.old_count), count(kernel.new_count)]
    return [short(kernel.name, 60), time(kernel.old_ms), time(kernel.new_ms), more, *counts]
