"""recperf mlperf ACTION"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import GateFailed, UsageError
from ..runs.mlperf.check import RUNS, Convergence, LogVerdict, convergence, verdict
from ..runs.mlperf.lines import RULESET, logs_in
from .parse import JsonOption, choose_action, parse
from .terminal import conclude, print_text

ACTIONS = {
    "check": f"check logs against ruleset {RULESET} with the official checkers, several also for convergence",
}
HELP = """usage: recperf mlperf ACTION LOG... [OPTIONS]

{actions}

A LOG is a file of :::MLLOG lines, or a folder of them: a run (mlperf.log), or result_*.txt files.
  recperf mlperf ACTION --help    options of an action"""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(JsonOption):
    logs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="LOG...")] = ()
    """Logs, or folders of logs."""


CHECK = f"""Run the official compliance checker of ruleset {RULESET} on every log, check what it
leaves out in the closed division (learning rates, layers, history length), and run the official RCP checker on several
logs: did they need as many samples to the target as the reference? Exits 5 if a log or the set fails."""


def command(arguments: list[str]) -> int:
    if choose_action("mlperf", arguments, ACTIONS, HELP) is None:
        return 0
    options = parse(CheckOptions, arguments[1:], prog="recperf mlperf check", description=CHECK)
    if not options.logs:
        raise UsageError("mlperf check needs a log", fix="recperf mlperf check runs/<name of the run>")
    paths = logs_in(list(options.logs))
    verdicts = [verdict(path) for path in paths]
    rcp = convergence(paths) if len(paths) > 1 else None
    error = _failure(verdicts, rcp)
    if options.json:
        return conclude(error, {"logs": verdicts, "rcp": rcp})
    print_text("\n".join([*(_verdict_text(one) for one in verdicts), *(_rcp_text(rcp) if rcp else [])]))
    return conclude(error)


def _failure(verdicts: list[LogVerdict], rcp: Convergence | None) -> GateFailed | None:
    failed = [one for one in verdicts if not one.passed]
    what = [f"{len(failed)} of {len(verdicts)} logs fail ruleset {RULESET}"] if failed else []
    if rcp is not None and rcp.passed is False:
        what.append("the set fails the RCP check")
    if not what:
        return None
    return GateFailed("; ".join(what), where={"log": failed[0].log} if failed else None)


def _verdict_text(verdict: LogVerdict) -> str:
    lines = [f"{'passed' if verdict.passed else 'FAILED'}  {verdict.log}  ({verdict.division or 'no'} division)"]
    width = max((len(failure.rule) for failure in verdict.failures), default=0)
    lines += [f"  {failure.rule:<{width}}  {failure.text}" for failure in verdict.failures]
    lines += [f"  warning: {text}" for text in verdict.warnings]
    lines += [f"  not checked: {text}" for text in verdict.unchecked]
    return "\n".join(lines)


def _rcp_text(rcp: Convergence) -> list[str]:
    if not rcp.ran:
        return ["", f"RCP check not run: {rcp.text}"]
    lines = ["", f"RCP check {'passed' if rcp.passed else 'FAILED'}: {rcp.text}"]
    numbers = [
        ("logs", f"{rcp.logs}" + (f" (a submission has {RUNS})" if rcp.logs != RUNS else "")),
        ("global batch size", f"{rcp.batch_size:,}"),
        ("mean samples to the target", f"{rcp.mean_samples:,.0f}" if rcp.mean_samples else None),
        ("mean of the reference", f"{rcp.reference_mean:,.0f}" if rcp.reference_mean else None),
        ("least mean allowed", f"{rcp.least_mean:,.0f}" if rcp.least_mean else None),
        ("scores are multiplied by", f"{rcp.normalisation:.4f}" if rcp.normalisation else None),
    ]
    return [*lines, *(f"  {name + ':':<28}{text}" for name, text in numbers if text)]
