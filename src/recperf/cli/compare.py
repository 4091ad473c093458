"""recperf compare RUN RUN..."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..errors import UsageError
from ..runs.compare import Comparison, Row, compare, summary
from ..runs.report.reading import read
from ..runs.report.words import NOT_MEASURED, component, metric, percent, shown
from .parse import parse
from .report import write
from .terminal import print_json, table

DESCRIPTION = """What changed between runs: config, quality, step, budget, regime. The first run is the one the others
are held against."""


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")] = ()
    """Folders of finished runs, two or more."""
    out: Path | None = None
    """Also write the comparison as a page into this file."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""


def command(words: list[str]) -> int:
    options = parse(Options, words, prog="recperf compare", description=DESCRIPTION, default=Options())
    if len(options.runs) < 2:
        raise UsageError("compare needs at least two runs", fix="recperf compare runs/<one> runs/<other>")
    found = compare([read(folder) for folder in options.runs])
    page = write(list(options.runs), options.out) if options.out else None
    if options.json:
        print_json({**found.as_json(), **({"report": str(page)} if page else {})})
    else:
        print(as_text(found))
    if page:
        print(f"\npage: {page}", file=sys.stderr if options.json else sys.stdout)
    return 0


def as_text(found: Comparison) -> str:
    heads = ["", *found.runs]
    lines = [summary(found), "", *(f"note: {note}" for note in found.notes)]
    lines += ["", "config"]
    lines.append(table([heads, *_rows(found.config, shown, str)]) if found.config else "  the same")
    lines += ["", "quality", table(_remarked(heads, found.quality, _score, metric))]
    lines += ["", "speed", table(_remarked(heads, found.speed, _number, str))]
    lines += ["", f"share of a step ({'profiled' if found.profiled else 'clocked while training'})"]
    measured = table([heads, *_rows(found.budget, percent, component)]) if found.budget else f"  {NOT_MEASURED}"
    lines += [measured, "", "regime"]
    lines.append(table([heads, ["", *(value or NOT_MEASURED for value in found.regime.values)]]))
    return "\n".join(lines).lstrip("\n")


def _rows(rows: list[Row], say: Callable[[Any], str], name: Callable[[str], str]) -> list[list[str]]:
    return [[name(row.name), *("-" if value is None else say(value) for value in row.values)] for row in rows]


def _remarked(
    heads: list[str], rows: list[Row], say: Callable[[Any], str], name: Callable[[str], str]
) -> list[list[str]]:
    drawn = _rows(rows, say, name)
    if not any(row.remark for row in rows):
        return [heads, *drawn]
    return [[*heads, ""], *([*cells, row.remark] for cells, row in zip(drawn, rows))]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _score(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.4f}"
