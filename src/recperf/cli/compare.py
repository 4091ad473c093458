"""recperf compare RUN RUN..."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import UsageError
from ..runs.report.compare import Comparison, compare, summary
from ..runs.report.reading import read
from ..runs.report.run_report import comparison_sections
from ..runs.report.text import render_sections
from .parse import JsonOption, parse
from .report import write
from .terminal import print_json, print_text

DESCRIPTION = """Show what changed between runs: config, quality, step time, step budget, limit. The others are
compared with the first."""


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")] = ()
    """Folders of finished runs, two or more."""
    out: Path | None = None
    """Also write the comparison as a page into this file."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf compare", description=DESCRIPTION)
    if len(options.runs) < 2:
        raise UsageError("compare needs at least two runs", fix="recperf compare runs/<one> runs/<other>")
    comparison = compare([read(folder) for folder in options.runs])
    page = write(list(options.runs), options.out) if options.out else None
    if options.json:
        print_json({**comparison.as_json(), **({"report": str(page)} if page else {})})
    else:
        print_text(as_text(comparison))
    if page:
        print_text(f"\npage: {page}", stderr=options.json)
    return 0


def as_text(comparison: Comparison) -> str:
    return "\n".join([summary(comparison), *render_sections(comparison_sections(comparison))])
