"""recperf profile WORKLOAD, recperf profile --script PROGRAM, recperf profile --trace TRACE"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import to_json, with_absolute_paths
from ..distributed.launch import launch, rank_arguments, require_ranks
from ..distributed.ranks import Ranks, current
from ..distributed.shared_run import require_same_config
from ..errors import RecperfError, UsageError
from ..files import write_atomic, writing
from ..jsonfile import sealed
from ..measure.place_shares import folded
from ..measure.profile import StepProfile
from ..runs.record import PROFILE_MARK, Run, new_folder
from ..stop import FLAG
from ..terminal import Terminal, page_optional, print_error, print_json
from . import profile_script, profile_trace
from .options import C, Choice, WorkloadOptions, choose, read_options
from .parse import VerboseOption
from .run import as_rank

if TYPE_CHECKING:
    from ..execution.profiling import ProfileOptions

DESCRIPTION = """Explain what limits a workload (default: dlrm). Measures a window of steady steps after a warm-up, then
ranks possible fixes by predicted gain. recperf profile --script train.py -- ITS
ARGUMENTS does so for a program of your own, recperf profile --trace FILE for a trace of torch.profiler; --script --help
and --trace --help list their options."""

UNFINISHED = " before the profile was complete", "run the profile again"


@dataclass(frozen=True, kw_only=True)
class Options(WorkloadOptions[C], VerboseOption):
    try_fixes: bool = False
    """Apply each fix alone and all together, measure again, and show predicted and measured gains."""
    save_trace: bool = False
    """Write a trace for ui.perfetto.dev: trace.json.gz, or one file per rank (trace.rank0.json.gz, ...), which recperf
    profile --trace FOLDER combines."""
    confirm: bool = True
    """Run experiments that confirm the verdict, such as half the batch or half the threads, while they take under
    --confirm-seconds."""
    confirm_seconds: float = 10.0
    """Time limit of all experiments together."""
    steps: int = 48
    """Maximum number of steps to measure; fewer if steps take long."""
    run_dir: Path | None = None
    """Folder of the profile. Default: runs/<workload>-profile-<time>-<id>."""
    peaks: bool = True
    """Compare with the ceilings of this machine; they are measured first (some seconds) if none are stored."""
    report: bool = True
    """Write the page profile.html."""
    ranks: int = 0
    """Start this many processes on this host and profile them together. Leave it out under
    torchrun."""


def command(arguments: list[str]) -> int:
    flags = {argument.partition("=")[0] for argument in profile_script.own_arguments(arguments)}
    if "--script" in flags:
        return profile_script.command(arguments)
    if "--trace" in flags:
        return profile_trace.command(arguments)
    return as_rank(run_profile, arguments)


def run_profile(arguments: list[str], world: Ranks) -> int:
    """Run the command in this process, which may be one of several ranks or may have to start them."""
    if any(argument.partition("=")[0] == "--resume" for argument in arguments):
        raise UsageError("a profile cannot be resumed", fix="--config uses the config of a run")
    FLAG.poll()
    choice = choose(arguments, default="dlrm")
    options: Options[Any] = read_options(Options, choice, verb="profile", description=DESCRIPTION)
    if options.steps < 5:
        raise UsageError(f"--steps is {options.steps}; it must be at least 5")
    if options.try_fixes and not options.peaks:
        raise UsageError("fixes are predicted from this machine's ceilings", fix="--try-fixes without --no-peaks")
    require_ranks(world, options.ranks, choice.workload.name, hasattr(options.values, "distributed"))
    if max(options.ranks, world.size) > 1 and options.try_fixes:
        raise UsageError("--try-fixes is for one process", fix="leave --ranks out")
    if options.ranks > 1 and world.size == 1:

        def report_failure(error: RecperfError) -> None:
            error.fix = "run the profile again"
            print_error(error, as_json=options.json)

        return launch(rank_arguments(arguments), options.ranks, report_failure, verb="profile")
    terminal = Terminal(as_json=options.json, quiet=options.quiet or not world.is_leader, verbose=options.verbose)
    try:
        with FLAG.explained(*UNFINISHED):
            profile, folder = take(choice, options, terminal, world)
    finally:
        terminal.close()
    if world.is_leader:
        show(profile, folder, options, terminal)
    return 0


def show(profile: StepProfile, folder: Path, options: Options[Any], terminal: Terminal) -> None:
    """Print the profile and write its page; if that fails the profile itself is still valid."""
    from ..runs.evidence import read_peaks
    from ..runs.report import page
    from ..runs.report.profiles import report_of

    built = report_of(profile, read_peaks(folder / "peaks.json"))
    terminal.show(built)
    terminal.facts(("profile", str(folder / "profile.json")))
    if options.save_trace and current().size > 1:
        terminal.facts(("traces", f"recperf profile --trace {folder} compares and combines them"))
    if options.report:
        with page_optional(terminal):
            terminal.facts(("page", str(page.save(built, folder / "profile.html"))))
    if options.json:
        print_json(sealed(profile))


def request(options: Options[Any], folder: Path, world: Ranks) -> ProfileOptions:
    from ..execution.profiling import ProfileOptions

    trace = None
    if options.save_trace:
        # Hosts without a shared file system write the traces of their own ranks.
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        trace = folder / world.trace_name()
    return ProfileOptions(
        try_fixes=options.try_fixes,
        trace=trace,
        steps=options.steps,
        confirm=options.confirm_seconds if options.confirm else 0.0,
        run=folder.resolve().name,
    )


def take(choice: Choice, options: Options[Any], terminal: Terminal, world: Ranks) -> tuple[StepProfile, Path]:
    """Profile into a new folder; ranks other than 0 write only their traces."""
    config = with_absolute_paths(options.values)
    if world.size > 1:
        world.join(config.train.device, config.distributed.timeout_s)
        require_same_config(world, choice.workload.name, config, steps=options.steps, trace=options.save_trace)
    folder, run = options.run_dir or new_folder(f"{choice.workload.name}-profile"), None
    if world.is_leader:
        run = Run.create(choice.workload.name, to_json(config), folder=folder)
        write_atomic(folder / PROFILE_MARK, b"")
    try:
        from ..execution.profiling import profile
        from ..machine import machine_facts
        from ..measure.peaks import require as require_peaks

        FLAG.poll()
        peaks = require_peaks(None, terminal.notice) if options.peaks and run else None
        if run:
            run.write("machine.json", machine_facts())
        shared = world.broadcast(folder.resolve())
        measured = profile(choice.workload, config, peaks, request(options, shared, world), terminal.notice)
        FLAG.poll()
        if run and peaks is not None:
            run.write("peaks.json", peaks)
        if measured.workload is not None:
            measured.workload.preset = choice.preset
        if run:
            run.write("profile.json", sealed(measured))
            if measured.stacks:
                write_atomic(folder / "stacks.folded", folded(measured.stacks).encode())
    except BaseException:
        if run and not (folder / "profile.json").exists():
            traces = [path.name for path in folder.glob("trace*.json.gz")]
            run.discard("peaks.json", *traces, PROFILE_MARK)
        raise
    finally:
        if run:
            run.close()
    return measured, folder
