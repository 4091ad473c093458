"""recperf profile --script PROGRAM -- ITS ARGUMENTS"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..distributed.launch import rank_arguments
from ..errors import UsageError
from ..files import require_writable, write_atomic, writing
from ..folders import refuse_foreign
from ..jsonfile import sealed
from ..machine import usable_cores
from ..measure.place_shares import folded
from ..outputs import output_file
from ..runs.record import PROFILE_MARK, new_folder
from ..stop import FLAG
from ..terminal import Terminal, page_optional, print_error, print_json
from .parse import OutputOptions, VerboseOption, parse

if TYPE_CHECKING:
    from ..runs.step_report import Report

DESCRIPTION = """Explain what limits the steps of a Python program that is not changed. What follows -- are its own
arguments. The end of an optimizer's step is the end of a step, iterating a torch DataLoader is a wait for input. The
program is stopped after enough steps."""


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions, VerboseOption):
    script: Path
    """The program, as in python PROGRAM."""
    step_function: Annotated[str | None, tyro.conf.arg(metavar="MODULE:NAME")] = None
    """The return of this function ends a step, for a program whose optimizers do not tell, such as
    __main__:train_step or package.module:Trainer.step."""
    input_function: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODULE:NAME ...")] = ()
    """Functions that return or yield the batches of a program that does not use a torch DataLoader."""
    to_the_end: bool = False
    """Let the program run until it ends by itself."""
    learning: bool = False
    """Also watch how the program's models learn, and show what keeps them from it: docs/quality.md."""
    run_dir: Path | None = None
    """Folder of the profile, new or empty. Default: runs/script-profile-<time>-<id>."""
    report: bool = True
    """Write the page profile.html."""
    try_: Annotated[bool, tyro.conf.arg(name="try")] = True
    """Run the program again, beside itself with each advised change that can be made from outside, and show the gains
    that were measured. It does not run again where it wrote files, connected, started processes or read its input."""
    try_for: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Time for all trials together. Default: 60, or half of what the program ran if that is more; no limit with
    --try-fixes."""
    try_fixes: bool = False
    """Try also where the program writes files or connects: it does so again."""
    patch: Path | None = None
    """Write what gains as a diff for git apply, FILE.patch, and measure the program with it. Its files stay as they
    are."""
    ranks: int = 0
    """Start the program as this many processes on this host, as torchrun does, and profile them together. Leave it out
    under torchrun, and where the program starts its ranks itself."""
    peaks: bool = True
    """Compare with the ceilings of this machine; they are measured first (some seconds) if none are stored."""


def own_arguments(arguments: list[str]) -> list[str]:
    """Those before `--`; the program's own follow."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def command(arguments: list[str]) -> int:
    ours = own_arguments(arguments)
    options = parse(Options, ours, prog="recperf profile --script", description=DESCRIPTION)
    if options.ranks > 1:
        return _launch(options.ranks, arguments)
    first = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0) == 0
    place = options.run_dir or new_folder("script-profile")
    if (place / "profile.json").exists():
        raise UsageError("the folder already holds a profile", where={"folder": place}, fix="choose another --run-dir")
    refuse_foreign(place)
    require_writable(place)
    if options.patch is not None:
        if not (options.try_ or options.try_fixes):
            raise UsageError("a patch holds changes that were tried", fix="--patch without --no-try")
        output_file(options.patch, endings=(".patch", ".diff"), ours=_is_patch, what="a patch", option="--patch")
    # The program may change to another folder.
    place, folder = place.absolute(), Path.cwd()
    from ..execution.script import Program, profile_program
    from ..execution.started_processes import StartedProcesses

    program = Program(
        options.script,
        tuple(arguments[len(ours) + 1 :]),
        options.step_function,
        options.input_function,
        options.to_the_end,
        learning=options.learning,
    )
    with (
        StartedProcesses().ended_with_command(),
        FLAG.default_signals(),
        _stdout_to_stderr() if options.json else nullcontext(),
    ):
        outcome = profile_program(program, quiet=options.quiet or not first, peaks=options.peaks and first)
        several = "RANK" in os.environ or (outcome.report is not None and outcome.report.ranks is not None)
        if (options.try_ or options.try_fixes) and outcome.report is not None and not several:
            from ..execution.trials import try_advice

            with chdir(folder):
                say = Terminal(as_json=options.json, quiet=options.quiet).notice
                try_advice(
                    program, outcome, say, seconds=options.try_for, anywhere=options.try_fixes, patch=options.patch
                )
    if outcome.report is None:
        assert outcome.missing is not None
        if first:
            print_error(outcome.missing, as_json=options.json)
        return outcome.code or (outcome.missing.exit_code if first else 0)
    if first:
        _show(outcome.report, place, options)
    return outcome.code


def _launch(ranks: int, arguments: list[str]) -> int:
    """Run the command as several ranks of this host."""
    if os.environ.get("WORLD_SIZE"):
        raise UsageError("torchrun has started the ranks", fix="leave --ranks out")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ours = own_arguments(arguments)
    command = [*launcher, "-m", "recperf", "profile", *rank_arguments(ours), *arguments[len(ours) :]]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // ranks))
    from ..execution.started_processes import StartedProcesses

    started = StartedProcesses()
    with started.ended_with_command(), FLAG.default_signals():
        try:
            return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": threads}, check=False).returncode
        except KeyboardInterrupt:
            started.end()
            raise


def _is_patch(file: Path) -> bool:
    return file.read_bytes().startswith(b"--- a/")


def _show(report: Report, place: Path, options: Options) -> None:
    from ..runs.report.profiles import report_of

    terminal = Terminal(as_json=options.json, quiet=options.quiet, verbose=options.verbose)
    terminal.show(report_of(report))
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    write_atomic(place / PROFILE_MARK, b"")
    shown = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    report.save(place / "profile.json")
    terminal.facts(("profile", str(shown / "profile.json")))
    if report.stacks:
        write_atomic(place / "stacks.folded", folded(report.stacks).encode())
    with page_optional(terminal):
        if options.report:
            report.page(place / "profile.html")
            terminal.facts(("page", str(shown / "profile.html")))
    if options.json:
        print_json(sealed(report))


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what the program and its child processes print to stderr: stdout is for one JSON object."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)
