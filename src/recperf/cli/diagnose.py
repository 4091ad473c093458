"""recperf diagnose RUN"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import UsageError
from ..jsonfile import as_json
from ..stop import FLAG
from ..terminal import Terminal, page_optional, print_json
from .parse import OutputOptions, parse

DESCRIPTION = """Say what limits the quality of a finished run by experiments: its config with one change each, trained
on the same split. What gains is kept, and its options are printed with the gain that was measured. A diagnosis that
was stopped goes on where it was."""


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """Folder of a finished run."""
    minutes: float | None = None
    """Time for experiments. Default: five times the training, at least 1 minute."""
    report: bool = True
    """Write the page, diagnosis.html, in the folder of the run."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf diagnose", description=DESCRIPTION)
    if options.run is None:
        raise UsageError("diagnose needs a run", fix="recperf diagnose runs/<name of the run>")
    if options.minutes is not None and not 0 < options.minutes < 1e6:
        raise UsageError(f"--minutes is {options.minutes:g}; allowed: above 0")
    from ..execution.diagnosing import Diagnosing
    from ..runs import diagnosis_report
    from ..workloads.opened import read_saved

    workload, config = read_saved(options.run)
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    with FLAG.explained("; experiments that ended remain", f"recperf diagnose {options.run}"):
        diagnosis = Diagnosing(
            workload=workload, config=config, folder=options.run, report=terminal, minutes=options.minutes
        ).run()
    shown = diagnosis_report.report(diagnosis)
    terminal.show(shown)
    if options.report:
        from ..runs.report import page

        with page_optional(terminal):
            place = options.run / "diagnosis.html"
            terminal.facts(("page", str(page.save(shown, place))))
    if options.json:
        print_json(as_json(diagnosis))
    return 0
