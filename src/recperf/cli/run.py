"""recperf run [WORKLOAD]"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from ..config import to_json, with_absolute_paths
from ..distributed.exits import run_as_rank
from ..distributed.launch import launch, rank_arguments, require_ranks
from ..distributed.progress import job, remember_run, remembered_run, restarted, same_job
from ..distributed.ranks import Ranks, current, enter
from ..errors import ConfigError, DataError, GateFailed, MachineError, UsageError
from ..files import require_writable, write_atomic
from ..runs.record import Run, read_config
from ..runs.resume import (
    Change,
    allowed_before,
    changes,
    contract_of,
    free_changes,
    known_fields,
    remember,
    require_allowed,
)
from ..train.stop import StopFlag
from .options import C, Choice, WorkloadOptions, choose, read_options
from .summary import summary
from .terminal import Terminal, print_error, print_json

DESCRIPTION = """Train a workload (default: micro-dlrm), score it beside simple baselines and write a run folder.
WORKLOAD comes first; every option below overrides one field of its config."""

JOB = ".torchrun"
"""Which job of torchrun is at the run of a folder."""


@dataclass(frozen=True, kw_only=True)
class Options(WorkloadOptions[C]):
    resume: str | None = None
    """Go on with an interrupted run: its folder. Fields that could change a number stay as they are."""
    allow_change: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """With --resume: a field that may be overridden all the same, as train.batch_size; can be given several times."""
    run_dir: Path | None = None
    """Where to put the run; default runs/<workload>-<time>-<id>."""
    peaks: bool = True
    """Read the run against this machine's ceilings, measuring them first (some seconds) where none are kept."""
    report: bool = True
    """Write the run's page, report.html, at the end."""
    ranks: int = 0
    """Start so many processes on this host, each with a part of the tables and of every batch (docs/distributed.md);
    under torchrun leave it out."""
    restarts: int = 0
    """With --ranks: start all of them again so often, where one is killed, hangs or has no memory; they go on from the
    last checkpoint. torchrun has --max-restarts for it."""
    dry_run: bool = False
    """Check config, data and folder, say what would happen, and stop."""


def command(words: list[str]) -> int:
    world = enter(Ranks.from_environment())
    if world.size == 1:
        return one(words, world)
    return run_as_rank(world, lambda: one(words, world), lambda error: print_error(error, as_json="--json" in words))


def one(words: list[str], world: Ranks) -> int:
    """The command in this process, which may be one of several ranks, or is to start them."""
    # Signals count from the first moment: an early Ctrl-C must not surface as a traceback out of an import.
    with StopFlag() as stop:
        choice = choose(words)
        options: Options[Any] = read_options(Options, choice, verb="run", description=DESCRIPTION)
        if choice.resume and options.run_dir:
            raise UsageError("--resume names the folder; --run-dir cannot be given with it")
        if options.allow_change and not choice.resume:
            raise UsageError("--allow-change goes with --resume: a new run may have any config")
        if choice.resume:
            allowed_changes(choice, options)
        require_ranks(world, options.ranks, choice.workload.name, hasattr(options.values, "distributed"))
        if options.ranks > 1 and world.size == 1 and not options.dry_run:
            return started(words, options)
        if options.restarts:
            raise UsageError("--restarts goes with --ranks", fix="torchrun --max-restarts")
        terminal = Terminal(as_json=options.json, quiet=options.quiet or not world.is_leader)
        try:
            if options.dry_run and not world.is_leader:
                return 0
            if options.dry_run:
                return dry_run(choice, options, terminal)
            if world.size > 1:
                world.join(options.values.train.device, options.values.distributed.timeout_s)
                world.require_same_config(choice.workload.name, with_absolute_paths(options.values))
            return run(choice, options, stop, terminal) if world.is_leader else follow(choice, options, stop, terminal)
        finally:
            terminal.close()


def started(words: list[str], options: Options[Any]) -> int:
    """Be the launcher of several ranks."""
    if options.restarts < 0:
        raise UsageError(f"--restarts {options.restarts}: allowed are 0 and more")
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    try:
        return launch(
            rank_arguments(words),
            options.ranks,
            lambda error: print_error(error, as_json=options.json),
            restarts=options.restarts,
            notice=terminal.notice,
        )
    finally:
        terminal.close()


def allowed_changes(choice: Choice, options: Options[Any]) -> list[Change]:
    """Fields of the contract that a resumed run is to change, each of which must be allowed."""
    allow = known_fields(options.allow_change, choice.config)
    found = changes(contract_of(choice.config), contract_of(with_absolute_paths(options.values)))
    require_allowed(found, allow, {"run": choice.resume})
    return found


def dry_run(choice: Choice, options: Options[Any], terminal: Terminal) -> int:
    """Everything that can be found out without training."""
    data = choice.workload.check(options.values)
    estimate = choice.workload.estimate(options.values)
    place = choice.resume or options.run_dir or Path("runs") / f"{choice.workload.name}-<time>-<id>"
    if not choice.resume and options.run_dir and (options.run_dir / "config.json").exists():
        raise UsageError("the run folder already holds a run", where={"folder": options.run_dir})
    require_writable(place)
    if options.values.train.device == "cuda":
        from ..train.device import choose as choose_device

        choose_device(options.values.train, largest_product_flops=0)
    terminal.say(f"would train {choice.workload.name} on {data}")
    terminal.say(f"  {sum(estimate.parameters.values()):,} parameters, {estimate.total.flops:,} FLOPs a step")
    terminal.say(f"  into {place}")
    terminal.say("nothing was run")
    if options.json:
        print_json({"dry_run": True, "workload": choice.workload.name, "data": data, "config": to_json(options.values)})
    return 0


def follow(choice: Choice, options: Options[Any], stop: StopFlag, terminal: Terminal) -> int:
    """Train as a rank that writes nothing."""
    from ..execution.execute import execute

    world = current()
    if world.broadcast(False):
        return 0
    allow = world.broadcast(())
    record = world.share_run(None)
    execute(choice.workload, with_absolute_paths(options.values), record, stop, terminal, allow=allow)
    return 0


def run(choice: Choice, options: Options[Any], stop: StopFlag, terminal: Terminal) -> int:
    config = with_absolute_paths(options.values)
    if not choice.resume and current().size > 1:
        before = begun(choice, options, config)
        if before is not None:
            terminal.notice("the ranks were restarted and resume their run")
            choice = replace(choice, resume=before, config=config)
        elif restarted():
            terminal.notice("the ranks were restarted, but none of their runs was found here: a new run begins")
    if choice.resume:
        record = Run.open(choice.resume)
    else:
        record = Run.create(choice.workload.name, to_json(config), folder=options.run_dir)
    try:
        if current().size > 1:
            remember_run(record.folder)
            write_atomic(record.folder / JOB, job().encode())
        result = record.read("result.json") if record.finished else None
        current().broadcast(result is not None)
        if result is not None:
            terminal.notice("this run is finished already; nothing to do")
        else:
            terminal.say(f"{choice.workload.name}: starting in {record.folder}")
            with changed(choice, options, config, record, terminal):
                result = train(choice, config, options, record, stop, terminal)
    except (ConfigError, DataError, MachineError):
        if not choice.resume and not record.began:
            record.discard(JOB)
        raise
    finally:
        terminal.close()
        record.close()
    terminal.say(summary(result, record.folder, record.read("profile.json")))
    if options.report:
        write_page(record.folder, terminal)
    if options.json:
        print_json(result)
    if not result["quality"]["met"]:
        # The result is the one object on stdout, so the error is only said.
        missed = GateFailed("the quality target was missed", where={"run": record.folder})
        print_error(missed, as_json=False)
        return missed.exit_code
    return 0


def begun(choice: Choice, options: Options[Any], config: Any) -> Path | None:
    """The run that these ranks had begun, with this very config, when one of them failed and all were started again.

    Its folder is noted on the host it was begun on; on another one, --run-dir names a run of the same torchrun job.
    """
    found = remembered_run()
    if found is None and options.run_dir is not None and of_this_job(options.run_dir):
        found = options.run_dir
    if found is None or not (found / "config.json").exists():
        return None
    same = read_config(found) == (choice.workload.name, to_json(config))
    return found if same else None


def of_this_job(folder: Path) -> bool:
    """Whether a folder holds a run that this torchrun job has begun and not finished."""
    try:
        noted = (folder / JOB).read_text()
    except (OSError, ValueError):
        return False
    return same_job(noted) and not (folder / "seal.json").exists()


@contextmanager
def changed(choice: Choice, options: Options[Any], config: Any, record: Run, terminal: Terminal) -> Iterator[None]:
    """Keep in config.json what a resumed run is run with, and take it back where the saved state does not fit."""
    if not choice.resume or config == choice.config:
        yield
        return
    found = [*allowed_changes(choice, options), *free_changes(choice.config, config)]
    for change in found:
        terminal.notice(f"{change.field} changes from {change.was!r} to {change.now!r}")
    before = remember(record.folder, config, found)
    if any(change.field.startswith("data.") for change in found):
        # They were made of other rows.
        (record.folder / "baselines.json").unlink(missing_ok=True)
    try:
        yield
    except ConfigError:
        write_atomic(record.folder / "config.json", before)
        raise


def write_page(folder: Path, terminal: Terminal) -> None:
    """The page is for looking at; that it cannot be written must not fail a run that is done."""
    from ..runs.report.run_report import write

    try:
        terminal.say(f"  page    {write([folder], folder / 'report.html')}")
    except MachineError as error:
        terminal.notice(f"no page: {error.what}; {error.fix}")


def train(
    choice: Choice, config: Any, options: Options[Any], record: Run, stop: StopFlag, terminal: Terminal
) -> dict[str, Any]:
    # Torch takes seconds to import; everything that can fail sooner already has.
    from ..execution.execute import execute
    from .peaks import at_hand

    peaks = (lambda: at_hand(terminal)) if options.peaks else None
    # A field named here that config.json has already was edited there by hand.
    allow = (*allowed_before(record.folder), *known_fields(options.allow_change, config)) if choice.resume else ()
    world = current()
    world.broadcast(allow)
    return execute(choice.workload, config, world.share_run(record), stop, terminal, peaks, allow=allow)
