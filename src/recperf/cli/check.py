"""recperf check [RUN...]"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ..config import from_json
from ..errors import DataError, GateFailed, RecperfError, UsageError
from ..jsonfile import Struct
from ..runs.checkpoints import Checkpoint, listed, prune
from ..runs.contract import Claim, Evidence, Finding, JudgedClaim, check_run
from ..runs.evidence import SEAL
from ..runs.record import PROFILE_MARK, hold
from ..runs.report.formats import printable
from ..terminal import Terminal, conclude, table
from ..units import size
from ..workloads import find, names
from .parse import OutputOptions, parse

DESCRIPTION = """Recompute, from the files of a run, every claim that its workload makes.
A claim fails if its evidence is missing, was changed or belongs to another run. A claim about speed is not judged if
other work took too much of the cores while it was measured. Then list the checkpoints, after comparing every byte with
their digests. Exits 3 if a checkpoint is damaged, 5 if a claim fails."""
RUNS = Path("runs")
"""Where runs are unless --run-dir says otherwise."""

MARKS = ("config.json", "result.json", SEAL)
"""A folder with one of these files is a run, even if the others were removed."""


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of runs; without any, the newest run in the folder runs."""
    all: Path | None = None
    """Check every run in this folder."""
    prune: bool = False
    """Remove all but the newest intact checkpoints and the best intact one, and judge no claims."""
    keep: int = 1
    """With --prune: how many of the newest intact checkpoints of each seed to keep, in addition to the best one."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf check", description=DESCRIPTION)
    if options.keep < 1:
        raise UsageError(f"--keep is {options.keep}; it must be at least 1")
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    if options.prune:
        if not options.runs:
            raise UsageError("--prune needs the folder of a run", fix="recperf check RUN --prune")
        pruned = [remove_old(run, options.keep, terminal) for run in requested_runs(options)]
        return conclude(None, {"runs": pruned} if options.json else None)
    reports = []
    for folder in requested_runs(options):
        reports.append(report(folder))
        terminal.say(as_text(reports[-1]))
    error = damage(reports) or failure(reports)
    if error is None:
        rows = [row for one in reports for row in one.claims]
        open_ = sum(row.holds is None for row in rows)
        what = f"no claim is contradicted, {open_} not judged" if open_ else "everything holds"
        saved = sum(len(one.checkpoints) for one in reports)
        terminal.say(f"{what} (runs: {len(reports)}, claims: {len(rows)}, intact checkpoints: {saved})")
    return conclude(error, {"holds": error is None, "runs": reports} if options.json else None)


def requested_runs(options: Options) -> list[Path]:
    """The runs that the command line names, each once."""
    for folder in options.runs:
        if not is_run(folder):
            raise DataError(
                "there is no such run", where={"folder": folder}, fix="recperf check runs/<name of the run>"
            )
    folders = list(options.runs)
    if options.all is not None:
        if not options.all.is_dir():
            raise DataError("no folder there", where={"folder": options.all})
        inside = sorted(path for path in options.all.iterdir() if is_run(path))
        if not inside:
            raise UsageError("no runs in this folder", where={"folder": options.all}, fix="recperf check --all runs")
        folders += inside
    if not folders:
        inside = [path for path in RUNS.iterdir() if is_run(path)] if RUNS.is_dir() else []
        if not inside:
            raise UsageError("check needs a run: there is none in the folder runs", fix="recperf check FOLDER_OF_A_RUN")
        stamps = {path: [one.stat().st_mtime for name in MARKS if (one := path / name).exists()] for path in inside}
        folders = [max(inside, key=lambda path: (max(stamps[path]), path.name))]
    return list({folder.resolve(): folder for folder in folders}.values())


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run; a profile makes no claims."""
    if not folder.is_dir() or (folder / PROFILE_MARK).exists():
        return False
    return any((folder / name).exists() for name in MARKS)


class RunReport(Struct, kw_only=True):
    """The findings about one run, and its checkpoints."""

    run: str
    workload: str | None
    holds: bool
    claims: list[JudgedClaim]
    checkpoints: list[Checkpoint]
    checkpoints_lost: str | None
    """Why the checkpoints cannot be listed."""


def report(folder: Path) -> RunReport:
    name, claims = claims_of(folder)
    judged = check_run(folder, claims)
    checkpoints: list[Checkpoint] = []
    lost = None
    try:
        # Without a config, which the claims report, it cannot be told whose checkpoints these are.
        checkpoints = listed(folder, hashed=True) if name is not None else []
    except RecperfError as error:
        lost = error.what
    return RunReport(
        run=printable(str(folder)),
        workload=name,
        holds=all(claim.holds is not False for claim in judged),
        claims=judged,
        checkpoints=checkpoints,
        checkpoints_lost=lost,
    )


def claims_of(folder: Path) -> tuple[str | None, tuple[Claim, ...]]:
    """The workload of a run and its claims; for an unknown workload, one claim that fails."""
    try:
        saved = Evidence(folder).config
    except DataError as lack:
        return None, (_unknown_workload(f"no evidence: {lack}"),)
    name = saved.workload
    if name not in names():
        return printable(name), (_unknown_workload(f"{name!r} is not among {', '.join(names())}"),)
    try:
        config: Any = from_json(find(name).config, saved.config)
    except RecperfError as error:
        return name, (_unknown_workload(f"its config cannot be read: {error.what}"),)
    try:
        return name, tuple(find(name).claims(config))
    except Exception as error:
        # A workload of a user: its fault is a failed claim, not one of this program.
        return name, (_unknown_workload(f"its claims cannot be listed: {type(error).__name__}: {error}"),)


def _unknown_workload(detail: str) -> Claim:
    finding = Finding(holds=False, detail=detail)
    return Claim(name="workload", text="the workload is known", holds=lambda evidence: finding)


def as_text(report: RunReport) -> str:
    lines = [f"{report.run} ({report.workload or 'unknown workload'})"]
    for claim in report.claims:
        outcome = {True: "ok", False: "FAILED", None: "open"}[claim.holds]
        lines.append(f"  {outcome:<6}  {claim.text}: {claim.found}")
    return "\n".join([*lines, *checkpoint_lines(report.checkpoints)])


def checkpoint_lines(checkpoints: list[Checkpoint]) -> list[str]:
    """A table of the checkpoints, then their damages."""
    if not checkpoints:
        return []
    rows = [["checkpoint", "saved", "size", "files", "role", "state"]]
    for entry in checkpoints:
        role = " and ".join(word for word, has in (("last", entry.last), ("best", entry.best)) if has)
        state = "damaged" if entry.fault else "intact"
        where = f"seed {entry.seed}  step {entry.step:,}"
        rows.append([where, entry.when or "", size(entry.bytes), str(entry.files), role, state])
    return [table(rows), *(f"  seed {e.seed} step {e.step:,}: {e.fault}" for e in checkpoints if e.fault)]


def damage(reports: list[RunReport]) -> DataError | None:
    """The damaged and the lost checkpoints; None if all are intact."""
    where: dict[str, object] = {one.run: one.checkpoints_lost for one in reports if one.checkpoints_lost}
    fix = "restore it from a copy, or start a new run"
    for one in reports:
        damaged = [entry for entry in one.checkpoints if entry.fault]
        where |= {f"{one.run}, seed {entry.seed} {entry.name}": entry.fault for entry in damaged}
        lost = {e.seed for e in damaged} - {e.seed for e in one.checkpoints if not e.fault}
        if damaged and not lost:
            fix = "recperf run --resume continues from the newest intact one"
    count, total = len(where), sum(len(one.checkpoints) for one in reports)
    what = f"{count} of {total} checkpoints are damaged" if total else "checkpoints are damaged or missing"
    return DataError(what, where=where, fix=fix) if where else None


def remove_old(run: Path, keep: int, terminal: Terminal) -> dict[str, object]:
    """Remove the older checkpoints of a run."""
    listed(run, hashed=False)
    # A running training must not lose checkpoints it relies on.
    nothing = "nothing was removed"
    lock = hold(run, busy=f"wait until it is done; {nothing}", refused=nothing)
    try:
        removed = [
            {"folder": str(path), "step": int(path.name.removeprefix("step-")), "why": why}
            for path, why in prune(run, keep)
        ]
    finally:
        os.close(lock)
    for entry in removed:
        terminal.say(f"removed {entry['folder']} ({entry['why']})")
    remaining = listed(run, hashed=False)
    terminal.say(f"{run}: {len(removed)} checkpoints removed, {len(remaining)} left")
    return {"run": printable(str(run)), "removed": removed, "checkpoints": remaining}


def failure(reports: list[RunReport]) -> GateFailed | None:
    """How many claims failed, and which in which run; None if all hold."""
    failed = {r.run: [claim.name for claim in r.claims if claim.holds is False] for r in reports}
    failed = {run: names for run, names in failed.items() if names}
    if not failed:
        return None
    count, total = sum(map(len, failed.values())), sum(len(r.claims) for r in reports)
    return GateFailed(
        f"{count} of {total} claims failed, in {len(failed)} of {len(reports)} runs",
        where={run: ", ".join(names) for run, names in failed.items()},
    )
