"""recperf mlperf ACTION"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import GateFailed, UsageError
from ..runs.mlperf.check import Convergence, LogVerdict, convergence, verdict
from ..runs.mlperf.lines import RULESET, RUNS, logs_in
from .parse import JsonOption, choose_action, parse
from .terminal import conclude, print_json, print_text

ACTIONS = {
    "check": f"check logs against ruleset {RULESET} with the official checkers, several also for convergence",
    "package": "create the result folder of a submission",
}
HELP = """usage: recperf mlperf ACTION LOG... [OPTIONS]

{actions}

A LOG is a file of :::MLLOG lines, or a folder of them: a run (mlperf.log), or result_*.txt files.
  recperf mlperf ACTION --help    options of an action"""

Logs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="LOG...")]


def command(arguments: list[str]) -> int:
    action = choose_action("mlperf", arguments, ACTIONS, HELP)
    if action is None:
        return 0
    return {"check": check, "package": package}[action](arguments[1:])


@dataclass(frozen=True, kw_only=True)
class CheckOptions(JsonOption):
    logs: Logs = ()
    """Logs, or folders of logs."""


CHECK = f"""Run the official compliance checker of ruleset {RULESET} on every log, check what it
leaves out in the closed division (learning rates, layers, history length), and run the official RCP checker on several
logs: did they need as many samples to the target as the reference? Exits 5 if a log or the set fails."""


def check(arguments: list[str]) -> int:
    options = parse(CheckOptions, arguments, prog="recperf mlperf check", description=CHECK)
    paths = _logs(options.logs, "check")
    verdicts = [verdict(path) for path in paths]
    rcp = convergence(paths) if len(paths) > 1 else None
    error = _failure(verdicts, rcp)
    if options.json:
        return conclude(error, {"logs": verdicts, "rcp": rcp})
    print_text("\n".join([*(_verdict_text(one) for one in verdicts), *(_rcp_text(rcp) if rcp else [])]))
    return conclude(error)


def _logs(paths: tuple[Path, ...], action: str) -> list[Path]:
    if not paths:
        raise UsageError(f"mlperf {action} needs a log", fix=f"recperf mlperf {action} runs/<name of the run>")
    return logs_in(list(paths))


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


@dataclass(frozen=True, kw_only=True)
class PackageOptions(JsonOption):
    places: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR LOG...")] = ()
    """The folder to create, then logs, or folders of logs."""
    force: bool = False
    """Also pack logs that fail the official checker."""


PACKAGE = """Create a result folder (results, systems, benchmarks) for the official package checker and list what is
left to do. An existing folder is never overwritten; logs that fail the checker are refused."""


def package(arguments: list[str]) -> int:
    from ..runs.mlperf.package import package as lay_out

    options = parse(PackageOptions, arguments, prog="recperf mlperf package", description=PACKAGE)
    if len(options.places) < 2:
        raise UsageError("mlperf package needs a folder to create, and logs", fix="recperf mlperf package DIR LOG...")
    folder, *logs = options.places
    if any(folder.absolute() == log.absolute() for log in logs):
        raise UsageError("the folder to create is among the logs", where={"folder": folder})
    made = lay_out(folder, logs_in(logs), force=options.force)
    if options.json:
        print_json(made)
        return 0
    lines = [str(made.folder), *(f"  {path}" for path in made.files)]
    lines += ["", f"official package checker: {'no errors' if made.passed else 'errors'}"]
    lines += [f"  {text}" for text in made.faults]
    lines += ["", "left to do", *(f"  {text}" for text in made.left)]
    print_text("\n".join(lines))
    return 0
