"""recperf report RUN..."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import UsageError
from ..runs.report import run_report
from .parse import JsonOption, parse
from .terminal import print_json, print_text

DESCRIPTION = """Write the page of a run: one self-contained HTML file with figures, tables and provenance.
Several runs give one page with a comparison on top."""


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")] = ()
    """Folders of finished runs."""
    out: Path | None = None
    """Where to write; default report.html inside the run, or report-compare.html here for several."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf report", description=DESCRIPTION)
    if not options.runs:
        raise UsageError("report needs the folder of a run", fix="recperf report runs/<name of the run>")
    page = write(list(options.runs), options.out)
    if options.json:
        print_json({"report": str(page), "runs": [str(run) for run in options.runs]})
    else:
        print_text(str(page))
    return 0


def write(runs: list[Path], out: Path | None) -> Path:
    """Write the page, by default inside the run, or here for several runs."""
    if out is not None and out.is_dir():
        raise UsageError("--out is a folder; name a file", where={"folder": out}, fix=f"--out {out / 'report.html'}")
    place = runs[0] / "report.html" if len(runs) == 1 else Path("report-compare.html")
    return run_report.write(runs, out or place)
