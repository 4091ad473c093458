"""recperf mlperf ACTION"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..errors import GateFailed, UsageError, closest
from ..runs.mlperf.check import Convergence, Verdict, convergence, verdict
from ..runs.mlperf.curve import curves, published_logs
from ..runs.mlperf.library import RULESET, RUNS, TARGET
from ..runs.mlperf.lines import logs_in
from .parse import parse
from .terminal import print_error, print_json, table

ACTIONS = {
    "check": f"hold logs to ruleset {RULESET} with the official checkers; several also to the reference's convergence",
    "curve": "AUC against samples, and samples to the target, beside published logs",
    "package": "lay out a result folder for a submission",
}
HELP = """usage: recperf mlperf ACTION LOG... [OPTIONS]

{actions}

A LOG is a file of :::MLLOG lines, or a folder with some: a run's (mlperf.log), or one of result_*.txt.
  recperf mlperf ACTION --help    options of an action"""

Logs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="LOG...")]


def command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP.format(actions="\n".join(f"  {name:<8} {text}" for name, text in ACTIONS.items())))
        return 0
    actions = {"check": check, "curve": curve, "package": package}
    if words[0] not in actions:
        guess = closest(words[0], ACTIONS)
        raise UsageError(
            f"unknown action {words[0]!r}" + (f"; did you mean {guess!r}?" if guess else ""),
            fix="recperf mlperf --help",
        )
    return actions[words[0]](words[1:])


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    logs: Logs = ()
    """Logs, or folders that hold some."""
    division: Literal["closed", "open"] | None = None
    """Hold the logs to this division's rules; by default to those of the division each names."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""


CHECK = f"""Run the official compliance checker of ruleset {RULESET} on every log, and with several the official RCP
checker on the set: did they need as many samples to the target as the reference does? Exits 5 when a log or the set
fails."""


def check(words: list[str]) -> int:
    options = parse(CheckOptions, words, prog="recperf mlperf check", description=CHECK, default=CheckOptions())
    paths = _logs(options.logs, "check")
    verdicts = [verdict(path, options.division) for path in paths]
    together = convergence(paths) if len(paths) > 1 else None
    error = _failure(verdicts, together)
    if options.json:
        said = {"logs": [found.as_json() for found in verdicts], "rcp": together.as_json() if together else None}
        # One object on stdout: the error goes into it instead of after it.
        print_json({**said, **(error.as_json() if error else {})})
    else:
        print("\n".join([*(_verdict_text(found) for found in verdicts), *(_rcp_text(together) if together else [])]))
    if error is None:
        return 0
    print_error(error, as_json=False)
    return error.exit_code


def _logs(paths: tuple[Path, ...], action: str) -> list[Path]:
    if not paths:
        raise UsageError(f"mlperf {action} needs a log", fix=f"recperf mlperf {action} runs/<name of the run>")
    return logs_in(list(paths))


def _failure(verdicts: list[Verdict], together: Convergence | None) -> GateFailed | None:
    failed = [found for found in verdicts if not found.passed]
    what = [f"{len(failed)} of {len(verdicts)} logs fail ruleset {RULESET}"] if failed else []
    if together is not None and together.passed is False:
        what.append("the set fails the RCP check")
    if not what:
        return None
    return GateFailed("; ".join(what), where={"log": failed[0].path} if failed else None)


def _verdict_text(found: Verdict) -> str:
    lines = [f"{'passed' if found.passed else 'FAILED'}  {found.path}  ({found.division or 'no'} division)"]
    width = max((len(failure.rule) for failure in found.failures), default=0)
    lines += [f"  {failure.rule:<{width}}  {failure.text}" for failure in found.failures]
    lines += [f"  warning: {text}" for text in found.warnings]
    return "\n".join(lines)


def _rcp_text(found: Convergence) -> list[str]:
    if not found.ran:
        return ["", f"RCP check not run: {found.text}"]
    lines = ["", f"RCP check {'passed' if found.passed else 'FAILED'}: {found.text}"]
    figures = [
        ("logs", f"{found.logs}" + (f" (a submission has {RUNS})" if found.logs != RUNS else "")),
        ("global batch size", f"{found.batch_size:,}"),
        ("mean samples to the target", f"{found.mean_samples:,.0f}" if found.mean_samples else None),
        ("mean of the reference", f"{found.reference_mean:,.0f}" if found.reference_mean else None),
        ("least mean allowed", f"{found.least_mean:,.0f}" if found.least_mean else None),
        ("scores are multiplied by", f"{found.normalisation:.4f}" if found.normalisation else None),
    ]
    return [*lines, *(f"  {name + ':':<28}{text}" for name, text in figures if text)]


@dataclass(frozen=True, kw_only=True)
class CurveOptions:
    logs: Logs = ()
    """Logs, or folders that hold some; without any, the published ones alone."""
    published: str = "auto"
    """A folder of published logs, none, or auto: mlperf_logs in $RECPERF_GOLDEN or ../shared/golden where it is."""
    target: float = TARGET
    """AUC to reach."""
    out: Path | None = None
    """Also draw the curves into this file: .svg, .png or .html."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""


CURVE = """AUC against samples, of your logs and of published ones beside them, and the samples each needed to the
target."""


def curve(words: list[str]) -> int:
    from ..runs.mlperf import curve_plot

    options = parse(CurveOptions, words, prog="recperf mlperf curve", description=CURVE, default=CurveOptions())
    if not 0 < options.target <= 1:
        raise UsageError(f"--target is {options.target:g}; an AUC is above 0 and at most 1")
    published = {"auto": published_logs(), "none": []}.get(options.published, [Path(options.published)])
    if not options.logs and not published:
        raise UsageError("mlperf curve needs a log", fix="recperf mlperf curve runs/<name of the run>")
    found = curves(list(options.logs), published, options.target)
    drawn = curve_plot.write(found, options.out) if options.out else None
    if options.json:
        said = {"target": options.target, "curves": [each.as_json() for each in found]}
        print_json({**said, **({"figure": str(drawn)} if drawn else {})})
    else:
        print(table(curve_plot.rows(found)))
    if drawn:
        print(f"\nfigure: {drawn}", file=sys.stderr if options.json else sys.stdout)
    return 0


@dataclass(frozen=True, kw_only=True)
class PackageOptions:
    places: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR LOG...")] = ()
    """The folder to make, then logs, or folders that hold some."""
    force: bool = False
    """Pack logs that fail the official checker too."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""


PACKAGE = """Lay out a result folder: results, systems and benchmarks as the official package checker wants them, and
say what is left to do. An existing folder is never overwritten; logs that fail the checker are refused."""


def package(words: list[str]) -> int:
    from ..runs.mlperf.package import package as lay_out

    options = parse(PackageOptions, words, prog="recperf mlperf package", description=PACKAGE, default=PackageOptions())
    if len(options.places) < 2:
        raise UsageError("mlperf package needs a folder to make, and logs", fix="recperf mlperf package DIR LOG...")
    folder, *logs = options.places
    if any(folder.absolute() == log.absolute() for log in logs):
        raise UsageError("the folder to make is among the logs", where={"folder": folder})
    made = lay_out(folder, logs_in(logs), force=options.force)
    if options.json:
        print_json(made.as_json())
        return 0
    lines = [str(made.folder), *(f"  {path}" for path in made.files)]
    lines += ["", f"official package checker: {'no errors' if made.passed else 'errors'}"]
    lines += [f"  {text}" for text in made.faults]
    lines += ["", "left to do", *(f"  {text}" for text in made.left)]
    print("\n".join(lines))
    return 0
