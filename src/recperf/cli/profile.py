"""recperf profile WORKLOAD"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..config import to_json, with_absolute_paths
from ..distributed.exits import run_as_rank
from ..distributed.launch import launch, rank_arguments, require_ranks
from ..distributed.ranks import Ranks, current, enter
from ..errors import MachineError, RecperfError, UsageError
from ..files import write_atomic, writing
from ..jsonfile import read as read_json
from ..runs.record import PROFILE_MARK, Run
from .options import C, Choice, WorkloadOptions, choose, read_options
from .terminal import Terminal, print_error, print_json

if TYPE_CHECKING:
    from ..execution.profiling import Wish

DESCRIPTION = """What limits a workload (default: dlrm), with evidence: a bounded window of steady steps, without the
warm-up, then what could be switched, ranked by predicted gain. docs/profiling.md says how each figure comes about."""


@dataclass(frozen=True, kw_only=True)
class Options(WorkloadOptions[C]):
    mode: Literal["full", "budget"] = "full"
    """budget: spans only, under a tenth of a step on a CPU; full: also steps under torch.profiler, for the tables of
    operators and kernels."""
    try_fixes: bool = False
    """Apply each fix alone and all together, measure again, and show predicted beside measured gains."""
    trace: bool = False
    """Keep a trace for ui.perfetto.dev, trace.json.gz in the folder; of several ranks one each, trace.rank0.json.gz and
    so on, which recperf trace merge joins."""
    trace_mb: float = 50.0
    """Most megabytes of that trace; whole steps are kept."""
    stalls: bool = False
    """Also why the warps of the heaviest kernels stall, by Nsight Compute in a process of its own."""
    steps: int = 48
    """Steps to clock; fewer where a step takes long."""
    run_dir: Path | None = None
    """Where to put the profile; default runs/<workload>-profile-<time>-<id>."""
    peaks: bool = True
    """Read the profile against this machine's ceilings, measuring them first (some seconds) where none are kept."""
    report: bool = True
    """Write the page, profile.html."""
    ranks: int = 0
    """Start so many processes on this host, which take the same window together (docs/distributed.md); under torchrun
    leave it out."""


def command(words: list[str]) -> int:
    world = enter(Ranks.from_environment())
    if world.size == 1:
        return one(words, world)
    return run_as_rank(world, lambda: one(words, world), lambda error: print_error(error, as_json="--json" in words))


def one(words: list[str], world: Ranks) -> int:
    """The command in this process, which may be one of several ranks, or is to start them."""
    if any(word.partition("=")[0] == "--resume" for word in words):
        raise UsageError("a profile has nothing to resume", fix="--config takes the config of a run")
    choice = choose(words, default="dlrm")
    options: Options[Any] = read_options(Options, choice, verb="profile", description=DESCRIPTION)
    if not options.trace_mb > 0:
        raise UsageError(f"--trace-mb is {options.trace_mb:g}; it must be above 0")
    if options.steps < 5:
        raise UsageError(f"--steps is {options.steps}; fewer than 5 say nothing")
    if options.mode == "budget" and (options.trace or options.stalls):
        raise UsageError("--trace and --stalls need --mode full")
    if options.try_fixes and not options.peaks:
        raise UsageError("fixes are predicted from this machine's ceilings", fix="--try-fixes without --no-peaks")
    require_ranks(world, options.ranks, choice.workload.name, hasattr(options.values, "distributed"))
    if max(options.ranks, world.size) > 1 and (options.try_fixes or options.stalls):
        raise UsageError("--try-fixes and --stalls are for one process", fix="leave --ranks out")
    if options.ranks > 1 and world.size == 1:
        return launch(rank_arguments(words), options.ranks, lambda e: gone(e, options), verb="profile")
    if not world.is_leader:
        return follow(choice, options, world)
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    try:
        with ended_by_signal():
            found, folder = take(choice, options, terminal)
    finally:
        terminal.close()
    tell(found, folder, options, terminal)
    return 0


def gone(error: RecperfError, options: Options[Any]) -> None:
    """Say why ranks ended; there is no state to go on from."""
    error.fix = "take the profile again"
    print_error(error, as_json=options.json)


def tell(found: dict[str, Any], folder: Path, options: Options[Any], terminal: Terminal) -> None:
    from ..runs.report.profile_report import text

    terminal.say(text(found))
    terminal.say(f"\n  profile  {folder / 'profile.json'}")
    if options.trace and current().size > 1:
        terminal.say(f"  traces   recperf trace merge {folder} joins those of the ranks")
    if options.report:
        write_page(found, folder, terminal)
    if options.json:
        print_json(found)


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that nothing half-done stays: a profile cannot be resumed."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def follow(choice: Choice, options: Options[Any], world: Ranks) -> int:
    """Profile as a rank that writes nothing but its trace."""
    config = with_absolute_paths(options.values)
    join(choice, config, options, world)
    folder = world.broadcast(Path())
    from ..execution.profiling import profile

    with ended_by_signal():
        profile(choice.workload, config, None, wished(options, folder, world), lambda text: None)
    return 0


def join(choice: Choice, config: Any, options: Options[Any], world: Ranks) -> None:
    if world.size > 1:
        world.join(config.train.device, config.distributed.timeout_s)
        asked = {"mode": options.mode, "steps": options.steps, "trace": options.trace, "trace_mb": options.trace_mb}
        world.require_same_config(choice.workload.name, config, **asked)


def wished(options: Options[Any], folder: Path, world: Ranks) -> Wish:
    from ..execution.profiling import Wish

    trace = None
    if options.trace:
        # Without a file system of their own hosts keep the traces of their ranks.
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        trace = folder / world.trace_name()
    return Wish(
        full=options.mode == "full",
        try_fixes=options.try_fixes,
        trace=trace,
        trace_mb=options.trace_mb,
        steps=options.steps,
        run=folder.resolve().name,
    )


def take(choice: Choice, options: Options[Any], terminal: Terminal) -> tuple[dict[str, Any], Path]:
    """Profile into a folder of its own."""
    config, world = with_absolute_paths(options.values), current()
    join(choice, config, options, world)
    folder = options.run_dir
    if folder is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        folder = Path("runs") / f"{choice.workload.name}-profile-{stamp}-{secrets.token_hex(3)}"
    run = Run.create(choice.workload.name, to_json(config), folder=folder)
    write_atomic(folder / PROFILE_MARK, b"")
    try:
        from ..execution.profiling import profile
        from ..machine import machine_facts
        from .peaks import at_hand

        peaks = at_hand(terminal) if options.peaks else None
        run.write("machine.json", machine_facts())
        if peaks is not None:
            run.write("peaks.json", peaks)
        world.broadcast(folder.resolve())
        found = profile(choice.workload, config, peaks, wished(options, folder, world), terminal.notice)
        found["preset"] = choice.preset
        if options.stalls:
            found["stalls"] = stalls(found, folder, terminal)
        run.write("profile.json", found)
    except BaseException:
        if not (folder / "profile.json").exists():
            traces = [path.name for path in folder.glob("trace*.json.gz")]
            run.discard("peaks.json", *traces, PROFILE_MARK)
        raise
    finally:
        run.close()
    return found, folder


def stalls(found: dict[str, Any], folder: Path, terminal: Terminal) -> dict[str, Any]:
    """The heaviest kernels under Nsight Compute, or what is missing for it."""
    from ..execution.profiling import stall_command
    from ..measure.stalls import stalls as sample

    kernels = found["kernels"]
    if "rows" not in kernels:
        return {"missing": f"no kernels to look at: {kernels['missing']}"}
    terminal.notice("running a few steps under Nsight Compute; this takes a minute or two")
    names = list(dict.fromkeys(row["name"] for row in kernels["rows"]))[:5]
    return sample(stall_command(folder / "config.json"), names)


def write_page(found: dict[str, Any], folder: Path, terminal: Terminal) -> None:
    """The page is for looking at; that it cannot be written must not fail a profile that is done."""
    from ..runs.report.profile_report import write_page as write_profile

    peaks = folder / "peaks.json"
    try:
        page = write_profile(
            found, read_json(peaks) if peaks.exists() else None, read_json(folder / "machine.json"),
            folder / "profile.html",
        )  # fmt: skip
        terminal.say(f"  page     {page}")
    except MachineError as error:
        terminal.notice(f"no page: {error.what}; {error.fix}")
