"""recperf mlperf ACTION"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import GateFailed, UsageError
from ..runs.mlperf.check import RULESET, LogVerdict, logs_in, verdict
from ..terminal import conclude, print_text
from .parse import JsonOption, choose_action, parse

ACTIONS = {
    "check": f"check logs against ruleset {RULESET} with the official checker",
}
HELP = """usage: recperf mlperf ACTION LOG... [OPTIONS]

{actions}

A LOG is a file of :::MLLOG lines, or a folder of them: a run (mlperf.log), or result_*.txt files.
  recperf mlperf ACTION --help    options of an action"""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(JsonOption):
    logs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="LOG...")] = ()
    """Logs, or folders of logs."""


CHECK = f"""Run the official compliance checker of ruleset {RULESET} on every log, and check what it
leaves out in the closed division: learning rates, layers, history length. Exits 5 if a log fails."""


def command(arguments: list[str]) -> int:
    if choose_action("mlperf", arguments, ACTIONS, HELP) is None:
        return 0
    options = parse(CheckOptions, arguments[1:], prog="recperf mlperf check", description=CHECK)
    if not options.logs:
        raise UsageError("mlperf check needs a log", fix="recperf mlperf check runs/<name of the run>")
    paths = logs_in(list(options.logs))
    verdicts = [verdict(path) for path in paths]
    failed = [one for one in verdicts if not one.passed]
    what = f"{len(failed)} of {len(verdicts)} logs fail ruleset {RULESET}"
    error = GateFailed(what, where={"log": failed[0].log}) if failed else None
    if not options.json:
        print_text("\n".join(_verdict_text(one) for one in verdicts))
    return conclude(error, {"logs": verdicts} if options.json else None)


def _verdict_text(verdict: LogVerdict) -> str:
    lines = [f"{'passed' if verdict.passed else 'FAILED'}  {verdict.log}  ({verdict.division or 'no'} division)"]
    lines += [f"  {key}: {text}" for key, text in verdict.failures.items()]
    lines += [f"  warning: {text}" for text in verdict.warnings]
    lines += [f"  not checked: {text}" for text in verdict.unchecked]
    return "\n".join(lines)
