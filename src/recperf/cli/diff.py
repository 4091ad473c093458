"""recperf diff PROFILE PROFILE"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import GateFailed, UsageError
from ..runs.profile_diff import Change, Diff, Kernel, change_text, diff, load, parse_gate
from ..runs.report.formats import NONE, component, count, short, spread, time
from ..runs.report.text import columns
from .parse import parse
from .terminal import print_error, print_json

DESCRIPTION = """What got slower or faster between two profiles, by part of the step and by kernel. The second is held
against the first. Exits 5 when --gate is given and the step, or a part of at least 5% of it, got slower by more than
the gate with ranges from p20 to p80 that do not overlap."""

TOP = 12


@dataclass(frozen=True, kw_only=True)
class Options:
    profiles: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PROFILE PROFILE")] = ()
    """Two profile.json files, or folders that hold one: of recperf profile, or of any run."""
    gate: str | None = None
    """Exit 5 when something got slower by more than this, such as 5%."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""


def command(words: list[str]) -> int:
    options = parse(Options, words, prog="recperf diff", description=DESCRIPTION, default=Options())
    if len(options.profiles) != 2:
        raise UsageError(f"diff needs two profiles, got {len(options.profiles)}", fix="recperf diff OLD NEW")
    gate = parse_gate(options.gate) if options.gate is not None else None
    old, new = (load(path) for path in options.profiles)
    found = diff(old, new)
    error = failure(found, gate)
    if options.json:
        held = None if gate is None else {"limit": gate, "beyond": [c.name for c in found.regressions(gate)]}
        # One object on stdout: the error goes into it instead of after it.
        print_json({**found.as_json(), "gate": held, **(error.as_json() if error else {})})
    else:
        print(as_text(found))
        if gate is not None and error is None:
            print(f"\ngate: nothing got slower by more than {gate * 100:.4g}%")
    if error is None:
        return 0
    print_error(error, as_json=False)
    return error.exit_code


def failure(found: Diff, gate: float | None) -> GateFailed | None:
    """Which parts are beyond the gate; none where none is."""
    beyond = found.regressions(gate) if gate is not None else []
    if gate is None or not beyond:
        return None
    listed = ", ".join(f"{component(change.name)} {change_text(change)}" for change in beyond)
    where: dict[str, object] = {
        component(change.name): f"{time(change.old['p50'])} -> {time(change.new['p50'])}"
        for change in beyond
        if change.old and change.new
    }
    return GateFailed(f"slower beyond the gate of {gate * 100:.4g}%: {listed}", where=where)


def as_text(found: Diff) -> str:
    lines = [f"{found.files[0]} -> {found.files[1]}"]
    lines += [f"WARNING: {text}" for text in found.warnings]
    lines += [f"note: {text}" for text in found.notes]
    rows = [["", "before", "p20 – p80", "after", "p20 – p80", "change", ""]]
    rows.append(_row("step", found.step))
    rows += [_row(component(change.name), change) for change in found.components]
    lines += ["", "step and parts, the largest change first", *columns(rows, left=(6,))]
    lines += ["", "kernels", *_kernels(found)]
    return "\n".join(lines)


def _row(name: str, change: Change) -> list[str]:
    said = []
    for ms in (change.old, change.new):
        said += [time(ms["p50"]), spread(ms)] if ms else [NONE, NONE]
    return [short(name, 30), *said, change_text(change) if change.ratio is not None else NONE, change.says]


def _kernels(found: Diff) -> list[str]:
    if found.no_kernels:
        return [f"  {found.no_kernels}"]
    groups = (
        ("in both", [k for k in found.kernels if k.old_ms is not None and k.new_ms is not None and k.more_ms]),
        ("gone", [k for k in found.kernels if k.new_ms is None]),
        ("new", [k for k in found.kernels if k.old_ms is None]),
    )
    rows = [["", "before", "after", "difference", "count before", "after"]]
    lines = []
    for title, kernels in groups:
        if kernels:
            rows += [[f"{title}:", "", "", "", "", ""], *(_kernel(kernel) for kernel in kernels[:TOP])]
            rows += [[f"  and {len(kernels) - TOP} more", *[""] * 5]] if len(kernels) > TOP else []
    if len(rows) > 1:
        lines += columns(rows, shorten_first=True)
    same = sum(1 for k in found.kernels if k.old_ms is not None and k.new_ms is not None and not k.more_ms)
    return [*lines, *([f"  {same} take the same time in both"] if same else [])] or ["  none in either"]


def _kernel(kernel: Kernel) -> list[str]:
    more = f"{'+' if kernel.more_ms > 0 else '-'}{time(abs(kernel.more_ms))}"
    counts = [count(kernel.old_count), count(kernel.new_count)]
    return [short(kernel.name, 60), time(kernel.old_ms), time(kernel.new_ms), more, *counts]
